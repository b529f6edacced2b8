"""The JSON reference, made from kvcalc/documents: every document, every key, its type and its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvcalc.schema import SCHEMA_VERSION, load_schema

_HEAD = """\
<!-- Generated from kvcalc/documents by `python -m tests.reference`. Do not edit. -->

# JSON reference

Every document kvcalc prints with `--json`, as `schema_version` {version}. The package has the same as a JSON Schema:
`kvcalc.schema.load_schema()`.

Sizes are in bytes, lengths in tokens, times in seconds; the key names the unit. Every key is always
present: a figure that was not asked for, or is not known, is `null`. `--get` takes a path such as
`kv_cache.total_bytes`. `[]` stands for an index: `kv_cache.layers.0.kind`.
"""

# Joined to the key of an array's items.
_ITEM = "[]"


def page() -> str:
    """The whole page."""
    definitions = load_schema()["$defs"]
    documents = [name for name, schema in definitions.items() if is_document(schema)]
    parts = [name for name in definitions if name not in documents]
    sections = [
        _HEAD.format(version=SCHEMA_VERSION),
        "## Documents\n",
        *(_section(name, definitions[name]) for name in documents),
        "## Parts\n\nParts that documents share.\n",
        *(_section(name, definitions[name]) for name in parts),
    ]
    return "\n".join(sections)


def is_document(schema: dict[str, Any]) -> bool:
    """Whether a definition is what a command prints, and not a part of it."""
    return str(schema.get("description", "")).startswith("kvcalc ")


def _section(name: str, schema: dict[str, Any]) -> str:
    said = str(schema.get("description", ""))
    # A document's description begins with its command line.
    command, colon, rest = re.split(r"([:;] )", f"{said}: ", maxsplit=1)
    if is_document(schema):
        said = f"`{command}`{colon}{rest}"
    lines = [f"### {name}\n"]
    if said:
        lines.append(f"{said[0].upper()}{said[1:]}.\n")
    if "properties" in schema:
        lines += ["| key | type | meaning |", "|---|---|---|", *_rows(schema, "")]
    else:
        lines.append(f"{_type(schema)}")
    return "\n".join(lines) + "\n"


def _rows(schema: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in schema["properties"].items():
        path = prefix + key
        meaning = " ".join(str(value.get("description", "")).split())
        yield f"| `{path}` | {_type(value)} | {_cell(meaning)} |"
        for inner, suffix in _objects(value):
            yield from _rows(inner, f"{path}{suffix}.")


def _objects(schema: dict[str, Any], suffix: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """Objects described in place, at any depth of choices and arrays, and what follows the key on the way there."""
    if "properties" in schema:
        yield schema, suffix
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _objects(choice, suffix)
    if isinstance(schema.get("items"), dict):
        yield from _objects(schema["items"], suffix + _ITEM)


def _type(schema: dict[str, Any]) -> str:
    """A type in words; a part is a link to its section."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name})"
    for choices in ("anyOf", "oneOf"):
        if choices in schema:
            return " or ".join(dict.fromkeys(_type(choice) for choice in schema[choices]))
    if "const" in schema:
        return f"`{_literal(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_literal(value)}`" for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " or ".join(_type({**schema, "type": one}) for one in kind)
    if kind == "array":
        items = schema.get("items")
        return f"array of {_type(items)}" if isinstance(items, dict) else "array"
    if kind == "null":
        return "`null`"
    return str(kind) if kind else "any"


def _literal(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
