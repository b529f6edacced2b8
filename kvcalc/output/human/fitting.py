"""Tables that fit the terminal: columns may be left out, and names are folded but never truncated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvcalc.output.human.console import Column, duration, table_of

_GAP = 2
# The first column is never folded to fewer characters.
_NARROWEST = 14
# A name is folded after one of these characters.
_BREAKS = "/-_. "


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], console: Console, optional: Sequence[str] = ()
) -> None:
    """Print `rows` within the console's width.

    The names in the first column are folded. If that is not enough, columns whose keys are in `optional` are left out
    in that order, and a line lists them.
    """
    (heading, key, print_), *others = columns
    narrowest = min(max(len(print_(row[key])) for row in rows), _NARROWEST)
    left_out: list[str] = []
    present = [column for name in optional for column in others if column[1] == name]
    while present and narrowest + _GAP + _width(rows, others) > console.width:
        column = present.pop(0)
        left_out.append(_title(column) or column[1])
        others.remove(column)
    room = max(console.width - _width(rows, others) - _GAP, narrowest)
    console.print(table_of(rows, [(heading, key, lambda value: fold(print_(value), room)), *others]))
    if left_out:
        console.print(f"not shown at {console.width} columns: {', '.join(left_out)}", style="dim")


def fold(name: str, width: int) -> str:
    """`name` in lines of at most `width`, broken after a separator if the line has one."""
    lines = []
    while len(name) > width:
        end = max((name.rfind(mark, 0, width) + 1 for mark in _BREAKS), default=0) or width
        lines.append(name[:end])
        name = name[end:]
    return "\n".join([*lines, name])


UNKNOWN_RANGE = "range unknown"


def span(seconds: float | None, low: float | None, high: float | None) -> str:
    """The range of a time in `seconds`, such as `39.1-54.7 ms`: `unknown` if it is not known, a dash without a time."""
    if low is None or high is None:
        return "-" if seconds is None else "unknown"
    (first, first_unit), (last, last_unit) = duration(low).split(), duration(high).split()
    return f"{first}-{last} {last_unit}" if first_unit == last_unit else f"{first} {first_unit}-{last} {last_unit}"


def _title(column: Column) -> str:
    return column[0].removeprefix(">")


def _width(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> int:
    widths = [
        max(len(_title(column)), *(len(print_(row[key])) for row in rows), 0)
        for column in columns
        for _, key, print_ in (column,)
    ]
    return sum(widths) + _GAP * (len(widths) - 1)
