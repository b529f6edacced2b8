"""The Python API with plain dictionaries: a test looks up keys that a type checker cannot follow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import jsonschema

import kvcalc
from kvcalc.notes import sentence
from kvcalc.output.path_hints import definition_of
from kvcalc.schema import load_schema


@cache
def _validator(kind: str) -> Any:
    schema = load_schema()
    return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{definition_of(schema, kind)}"})


def validate(document: Mapping[str, Any], kind: str) -> None:
    """Check a document against the schema in the wheel. Raises jsonschema.ValidationError."""
    _validator(kind).validate(document)


def estimate(*given: Any, **asked: Any) -> dict[str, Any]:
    """`kvcalc.estimate`."""
    document = cast("dict[str, Any]", kvcalc.estimate(*given, **asked))
    validate(document, "estimate")
    return document


def audit(*given: Any, **asked: Any) -> dict[str, Any]:
    """`kvcalc.audit`."""
    document = cast("dict[str, Any]", kvcalc.audit(*given, **asked))
    validate(document, "audit")
    return document


def texts(document: Mapping[str, Any]) -> list[str]:
    """A document's warnings as stderr prints them."""
    return [sentence(said) for said in document["warnings"]]
