"""Paths into a document: `kv_cache.layers.0.kind`, `.kv_cache.layers[0].kind`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.schema import Schema


def split_path(path: str) -> list[str | int]:
    """The parts of a path. A part in brackets is an int, every other part is text.

    `kv_cache.layers.0.kind` and jq's forms `.kv_cache.layers[0].kind`, `layers[-1]` and `.` (the whole document).
    Raises UsageError (exit 2) if the brackets are malformed.
    """
    if path == ".":
        return []
    parts: list[str | int] = []
    for word in path.removeprefix(".").split("."):
        name, bracket, rest = word.partition("[")
        if name or not bracket:
            parts.append(name)
        while bracket:
            number, close, rest = rest.partition("]")
            if not close or _index(number.removeprefix("-")) is None or rest[:1] not in ("", "["):
                raise UsageError(f"--get {path}: malformed brackets", "write an item's number: layers[0] or layers[-1]")
            parts.append(int(number))
            bracket, rest = rest[:1], rest[1:]
    return parts


def look_up(document: Any, path: str, kind: str | None = None) -> Any:
    """The value at `path`. If there is none, raises UsageError (exit 2), which suggests similar paths.

    `kind` names the document's definition in the schema. Its paths are suggested too.
    """
    value = document
    parts = split_path(path)
    for depth, part in enumerate(parts):
        index = _index(part)
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and index is not None and -len(value) <= index < len(value):
            value = value[index]
        else:
            from kvcalc.output.path_hints import missing_in_document

            raise missing_in_document(path, parts, depth, value, document, kind)
    return value


def check_against_schema(schema: Schema, kind: str, path: str) -> None:
    """Raise UsageError (exit 2) if no document of `kind` can have a value at `path`.

    Item numbers of lists are not checked, nor are keys that the schema leaves open.
    """
    from kvcalc.output.path_hints import definition_of, missing_in_schema, resolve

    node = schema["$defs"][definition_of(schema, kind)]
    parts = split_path(path)
    for depth, part in enumerate(parts):
        node = resolve(schema, node)
        if part in node.get("properties", {}):
            node = node["properties"][part]
        elif "items" in node and _index(part) is not None:
            node = node["items"]
        elif node.get("type") == "object" and node.get("additionalProperties", True) is not False:
            return
        else:
            raise missing_in_schema(path, parts, depth, schema, kind, node)


def _index(part: str | int) -> int | None:
    """A part of a path as the index of a list item, or None."""
    if isinstance(part, int):
        return part
    return int(part) if part.isascii() and part.isdigit() and len(part) < 20 else None


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
