"""The Python API with plain dictionaries: a test looks up keys that a type checker cannot follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import jsonschema_rs

import kvcalc
from kvcalc.notes import sentence
from kvcalc.output.path_hints import definition_of
from kvcalc.schema import load_schema


@cache
def _validator(kind: str) -> jsonschema_rs.Draft202012Validator:
    schema = load_schema()
    return jsonschema_rs.Draft202012Validator({**schema, "$ref": f"#/$defs/{definition_of(schema, kind)}"})


@cache
def _whole(kind: str) -> jsonschema_rs.Draft4Validator:
    """Checks that whole numbers are no floats: 1.0 is an integer in JSON Schema, but not in its Draft 4."""
    bounds = ("exclusiveMinimum", "exclusiveMaximum")  # flags in Draft 4

    def in_draft_4(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if key not in bounds}

    schema = load_schema()
    older = json.loads(json.dumps(schema), object_pairs_hook=in_draft_4)
    return jsonschema_rs.Draft4Validator({**older, "$ref": f"#/$defs/{definition_of(schema, kind)}"})


def validate(document: Mapping[str, Any], kind: str) -> None:
    """Check a document against the schema in the wheel, and that bytes and counts are exact integers.

    Raises jsonschema_rs.ValidationError.
    """
    _validator(kind).validate(document)
    _whole(kind).validate(document)


# The documents of commands that have more than one.
_KINDS = {
    "estimate": ("estimate", "engines", "server_refusal"),
    "fit": ("fit", "server_refusal"),
    "batch": ("estimate", "engines", "plan", "simulate", "check", "batch_error"),
    "check": ("check", "check_refusal"),
    "measure": ("measure", "measure_compare", "measure_profile"),
    "models": ("models", "models_show", "models_fit", "models_check"),
    "gpus": ("gpus", "gpus_show"),
}
# Of a long stream, the first lines.
_MOST_LINES = 100


def check_printed(command: str, out: str) -> None:
    """Check what a command printed on stdout, if that is a document, or a document on each line.

    Raises jsonschema_rs.ValidationError. Text, single values and output that was cut are not documents.
    """
    if not out.startswith("{"):
        return
    try:
        found = [json.loads(out)]
    except ValueError:
        try:
            found = [json.loads(line) for line in out.splitlines()[:_MOST_LINES] if line]
        except ValueError:
            return
    for document in found:
        if isinstance(document, dict) and "schema_version" in document:
            kinds = _KINDS.get(command, (command,))
            if not any(_validator(kind).is_valid(document) for kind in kinds):
                validate(document, "batch_error" if "error" in document else kinds[0])


def estimate(*given: Any, **asked: Any) -> dict[str, Any]:
    """`kvcalc.estimate`."""
    document = cast("dict[str, Any]", kvcalc.estimate(*given, **asked))
    validate(document, "estimate")
    return document


def fit(*given: Any, **asked: Any) -> dict[str, Any]:
    """`kvcalc.fit`."""
    document = cast("dict[str, Any]", kvcalc.fit(*given, **asked))
    validate(document, "fit")
    return document


def audit(*given: Any, **asked: Any) -> dict[str, Any]:
    """`kvcalc.audit`."""
    document = cast("dict[str, Any]", kvcalc.audit(*given, **asked))
    validate(document, "audit")
    return document


def texts(document: Mapping[str, Any]) -> list[str]:
    """A document's warnings as stderr prints them."""
    return [sentence(said) for said in document["warnings"]]
