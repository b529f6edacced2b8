"""Finds the function that counts a tower, or that says how many tokens an image takes (presets/types/towers.yaml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

from kvcalc.model.type_tables import made, row_of, rows_of


@cache
def rule_of(table: str, outer: str, kind: str) -> Any:
    """The rule of a tower of type `kind` in a model of type `outer`, or None if it is not known.

    `table` is `vision` or `audio`, whose rules count a tower (`Counted`) from its config, the width of the language
    model and the whole config; or `images`, whose rules make an `ImageRule` from both configs.
    """
    rows = rows_of("towers")[table]
    for key, name in (("by_model", outer), ("by_tower", kind), ("else_by_model", outer)):
        for rule, types, arguments in spelled_out(rows.get(key, {})):
            if name in types:
                return made("towers", rule, arguments) if "." in rule else _counted(rule)
    return None


def _counted(row: str) -> Any:
    from kvcalc.model.towers.weights import count  # images need none of it

    return partial(count, row_of("tower_weights", row))


def spelled_out(rows: Mapping[str, Any]) -> Iterator[tuple[str, list[str], dict[str, Any] | None]]:
    """The name of each rule, the types that have it, and the other arguments of its function, if it has some."""
    for rule, stated in rows.items():
        if isinstance(stated, str):
            yield rule, stated.split(), None
        else:
            for row in stated:
                yield rule, row["types"].split(), {name: value for name, value in row.items() if name != "types"}
