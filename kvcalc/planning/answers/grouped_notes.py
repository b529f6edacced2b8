"""Group notes: one note for a remark about several rows, instead of the same line for each row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from kvcalc.notes import Note
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

Row = tuple[str, ...]
"""The words that identify a row, such as its model, engine and device. A word is empty if there is nothing to name."""

# Replaces the device's name while remarks are compared. It occurs in no text.
_DEVICE = "\0"
# The most rows that a note names, so that it stays on one line.
_MOST_NAMED = 6


class RowNote(NamedTuple):
    """A note about one row, and the row's device or None."""

    row: Row
    note: Note
    gpu: Gpu | None = None


def group_notes(row_notes: Sequence[RowNote], rows: Sequence[Row]) -> list[Note]:
    """Each remark once, with the rows it applies to, named by the fewest words that identify them among `rows`.

    A remark about all rows names none. Remarks that differ only in the device they name are treated as one remark. Its
    note names all these devices, and names the rows by their other words.
    """
    devices = {gpu.name for _, _, gpu in row_notes if gpu is not None}
    by_template: dict[tuple[Note, Row], dict[str, None]] = {}
    for row, note, gpu in row_notes:
        name = _name_in(note.text, gpu)
        if name:
            note, row = note._replace(text=note.text.replace(name, _DEVICE)), _without(row, devices)
        by_template.setdefault((note, row), {})[name] = None
    groups: dict[tuple[Note, bool], list[Row]] = {}
    for (note, row), names in by_template.items():
        is_about_devices = _DEVICE in note.text
        filled = note._replace(text=note.text.replace(_DEVICE, ", ".join(names)))
        groups.setdefault((filled, is_about_devices), []).append(row)
    others = [_without(row, devices) for row in rows]
    return [
        note._replace(text=_text(note.text, name_rows(members, others if is_about_devices else rows)))
        for (note, is_about_devices), members in groups.items()
    ]


def _without(row: Row, devices: set[str]) -> Row:
    return tuple("" if word in devices else word for word in row)


def name_rows(members: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Names for `members`: their words in the fewest columns that identify them. Empty if `members` are all `rows`."""
    columns = [place for place, words in enumerate(zip(*rows)) if len(set(words)) > 1]
    for number in range(len(columns) + 1):
        for chosen in combinations(columns, number):
            wanted = dict.fromkeys(tuple(row[place] for place in chosen) for row in members)
            if all(row in members for row in rows if tuple(row[place] for place in chosen) in wanted):
                return [" ".join(filter(None, words)) for words in wanted if any(words)]
    return []


def _name_in(text: str, gpu: Gpu | None) -> str:
    """The device as `text` names it, with or without its kind. Empty if `text` does not name it."""
    if gpu is None:
        return ""
    from kvcalc.throughput.constants import device_kind

    names = (f"{gpu.name} ({device_kind(gpu)})", gpu.name)
    return next((name for name in names if name in text), "")


def _text(text: str, named: Sequence[str]) -> str:
    if all(name in text for name in named):
        return text
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return f"{', '.join(named[:_MOST_NAMED])}{more}: {text}"
