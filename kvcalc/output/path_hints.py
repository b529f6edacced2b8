"""The paths a document can have, from the JSON Schema, and suggestions for a mistyped path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.schema import Schema

_MOST_HINTS = 3
_LONGEST_PATH = 200


def definition_of(schema: Schema, kind: str) -> str:
    """The name in `$defs` of the documents of `kind`: `fit_document` for fit, because `fit` is a part of others."""
    document = f"{kind}_document"
    return document if document in schema["$defs"] else kind


def resolve(schema: Schema, node: Schema) -> Schema:
    """The node with its references followed. For a node that may also be null, the part that is not null."""
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
        else:
            node = next(option for option in node["anyOf"] if option.get("type") != "null")
    return node


def paths_of(schema: Schema, kind: str) -> list[str]:
    """Every path a document of `kind` can have, including objects and lists. List items have the number 0."""
    return list(_paths(schema, schema["$defs"][definition_of(schema, kind)], ""))


def missing_in_document(
    path: str, parts: Sequence[str | int], depth: int, value: Any, document: Any, kind: str | None
) -> UsageError:
    """The error for a path whose part number `depth` is missing in `value`."""
    known = list(_paths_in(document, ""))
    if kind is not None:
        from kvcalc.schema import load_schema

        schema = load_schema()
        if definition_of(schema, kind) in schema["$defs"]:
            known += paths_of(schema, kind)
    at = _spelled(parts[:depth]) or "the document"
    if value is None and depth:
        hint: str | None = f"{at} is null"
    elif isinstance(value, list) and _is_number(parts[depth]):
        hint = f"{at} is a list of {len(value)}" + (f": 0 to {len(value) - 1}" if value else "")
    else:
        hint = _suggest(parts, depth, known)
        if hint is None and isinstance(value, dict):
            hint = f"{at} has: {', '.join(value)}"
        elif hint is None and isinstance(value, list):
            hint = f"{at} is a list of {len(value)}"
        elif hint is None:
            hint = f"{at} is a single value"
    return _missing(path, hint)


def missing_in_schema(
    path: str, parts: Sequence[str | int], depth: int, schema: Schema, kind: str, node: Schema
) -> UsageError:
    """The error for a path that no document of `kind` has. `node` describes the value at the first `depth` parts."""
    at = _spelled(parts[:depth]) or "the document"
    hint = _suggest(parts, depth, paths_of(schema, kind))
    if hint is None and "properties" in node:
        hint = f"{at} has: {', '.join(node['properties'])}"
    elif hint is None:
        hint = f"{at} is a list" if "items" in node else f"{at} is a single value"
    return _missing(path, hint)


def _missing(path: str, hint: str | None) -> UsageError:
    return UsageError(f"--get {path[:_LONGEST_PATH] or repr(path)}: no such path", hint)


def _suggest(parts: Sequence[str | int], depth: int, known: Iterable[str]) -> str | None:
    """`did you mean A or B?` with full paths, or None if nothing is close. Part number `depth` is the wrong one."""
    typed = _normal(parts)
    if sum(map(len, typed)) > _LONGEST_PATH:
        return None
    by_parts = {tuple(path.split(".")): path for path in known}
    paths = (
        _ending_in(typed, by_parts)
        or _with_part_corrected(typed, depth, by_parts)
        or _ending_in(typed[-1:], by_parts)
        or _with_last_part_like(typed, by_parts)
    )
    text = ".".join(typed)
    closest = sorted(paths, key=lambda path: (-SequenceMatcher(None, text, ".".join(path)).ratio(), len(path)))
    names = [".".join((*_as_typed(parts, path), *path[len(parts) :])) for path in closest[:_MOST_HINTS]]
    return f"did you mean {' or '.join(names)}?" if names else None


def _ending_in(tail: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The shortest known paths that end in these parts. Paths in lists are used only if there are no others."""
    paths = [path for path in known if path[-len(tail) :] == tail] if any(tail) else []
    outside_lists = [path for path in paths if "0" not in path[: -len(tail)]]
    return sorted(outside_lists or paths, key=len)[:_MOST_HINTS]


def _with_part_corrected(typed: tuple[str, ...], depth: int, known: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The known paths with the wrong part corrected, followed by the rest of the typed path if they have it."""
    beside = {path[depth]: None for path in known if len(path) > depth and path[:depth] == typed[:depth]}
    close = _nearest(typed[depth], beside)
    whole = [(*typed[:depth], name, *typed[depth + 1 :]) for name in close]
    return [path for path in whole if path in known] or [path[: depth + 1] for path in whole]


def _with_last_part_like(typed: tuple[str, ...], known: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The known paths whose last part is closest to the last part typed."""
    close = _nearest(typed[-1], {path[-1]: None for path in known})
    return [path for name in close for path in _ending_in((name,), known)]


def _nearest(typed: str, names: Iterable[str]) -> list[str]:
    """At most three names: those that begin with the typed text, else those spelled most like it."""
    names = list(names)
    longer = [name for name in names if typed and name.startswith(typed)]
    return (longer or get_close_matches(typed, names, n=_MOST_HINTS, cutoff=0.75))[:_MOST_HINTS]


def _as_typed(parts: Sequence[str | int], path: tuple[str, ...]) -> Iterator[str]:
    """The first parts of a suggestion. Typed item numbers are kept for as long as the two paths agree."""
    typed, agree = _normal(parts), True
    for place, part in enumerate(path[: len(parts)]):
        agree = agree and part == typed[place]
        yield str(parts[place]) if agree and not str(parts[place]).startswith("-") else part


def _normal(parts: Sequence[str | int]) -> tuple[str, ...]:
    """The parts as in a path of the schema, which has 0 for every item number."""
    return tuple("0" if _is_number(part) else str(part) for part in parts)


def _is_number(part: str | int) -> bool:
    return isinstance(part, int) or (part.isascii() and part.isdigit())


def _spelled(parts: Sequence[str | int]) -> str:
    return ".".join(map(str, parts))


def _paths(schema: Schema, node: Schema, path: str) -> Iterator[str]:
    """The path of a node of the schema and the paths below it."""
    node = resolve(schema, node)
    if path:
        yield path
    for key, child in node.get("properties", {}).items():
        yield from _paths(schema, child, f"{path}.{key}" if path else key)
    if "items" in node:
        yield from _paths(schema, node["items"], f"{path}.0")


def _paths_in(value: Any, path: str) -> Iterator[str]:
    """The paths of a document. For a list, only those of its first item."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else [(0, value[0])] if isinstance(value, list) and value else []
    for key, item in items:
        yield from _paths_in(item, f"{path}.{key}" if path else str(key))
