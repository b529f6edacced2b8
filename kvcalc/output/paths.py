"""Dotted paths into a document (`kv_cache.layers.0.kind`) and values as bare text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvcalc.errors import UsageError, nearest

_BREAKS = str.maketrans("\t\n\r", "   ")


def look_up(document: Any, path: str) -> Any:
    """The value at `path`; list items by number. UsageError (exit 2) naming the part that is not there."""
    value = document
    for depth, part in enumerate(path.split(".")):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isascii() and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise _unknown(value, path, depth, part)
    return value


def check_against_schema(schema: dict[str, Any], kind: str, path: str) -> None:
    """UsageError (exit 2) where no document of `kind` can have anything at `path`. List items are checked by form."""
    node = schema["$defs"][kind]
    for depth, part in enumerate(path.split(".")):
        node = _resolve(schema, node)
        if part in node.get("properties", {}):
            node = node["properties"][part]
        elif "items" in node and part.isascii() and part.isdigit():
            node = node["items"]
        else:
            example = dict.fromkeys(node.get("properties", {}))
            raise _unknown(example or ([] if "items" in node else None), path, depth, part)


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and of alternatives with null take the other one."""
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        else:
            node = next(option for option in node["anyOf"] if option.get("type") != "null")
    return node


def _unknown(value: Any, path: str, depth: int, part: str) -> UsageError:
    at = ".".join(path.split(".")[:depth]) or "the document"
    if isinstance(value, dict):
        hint = nearest(part, value) or f"{at} has: {', '.join(value)}"
    elif isinstance(value, list):
        hint = f"{at} is a list of {len(value)}" + (f": 0 to {len(value) - 1}" if value else "")
    else:
        hint = f"{at} is {bare(value)}"
    return UsageError(f"--get {path}: nothing there", hint)


def bare(value: Any) -> str:
    """A value as a script wants it: strings as they are, null, true and false as in JSON, the rest compact JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def one_line(text: str) -> str:
    """A cell must not break its row: tabs and newlines become spaces."""
    return text.translate(_BREAKS)


def scalars(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar of a document with its path, in the document's order."""
    items: Any
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, item in items:
        yield from scalars(item, f"{path}.{key}" if path else str(key))
