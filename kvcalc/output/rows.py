"""Print rows as they are computed: csv, tsv, JSON lines, or a list in one document; and any document as tsv or csv.

Few rows are held in memory. Nothing is truncated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvcalc.output.paths import scalars
from kvcalc.writing.cells import cell, line

Block = tuple[dict[str, Any], tuple[str, ...], Iterable[tuple[Any, ...]], bool]
"""The columns that are the same in all rows, the names of the other columns, their values row by row, and whether all
these values are whole numbers."""

_LINES_AT_ONCE = 1024


def write_rows(columns: tuple[str, ...], blocks: Iterable[Block], format: str) -> None:
    """Print `blocks` under a header of `columns` (csv, tsv), or one object per line (jsonl)."""
    if format != "jsonl":
        sys.stdout.write(line(columns, format))
    for piece in _pieces(columns, blocks, format):
        sys.stdout.write(piece)
    sys.stdout.flush()


def write_document(
    head: Mapping[str, object], name: str, columns: tuple[str, ...], blocks: Iterable[Block], tail: Mapping[str, object]
) -> None:
    """Print one JSON document: `head`, the rows as a list of objects called `name`, and `tail`."""
    write = sys.stdout.write
    write(json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}"))
    write(f',\n  "{name}": [')
    before = "\n    "
    for piece in _pieces(columns, blocks, "jsonl"):
        write(before + piece[:-1].replace("\n", ",\n    "))
        before = ",\n    "
    write("\n  ],\n" + json.dumps(tail, indent=2, allow_nan=False).removeprefix("{\n") + "\n")
    sys.stdout.flush()


def _pieces(columns: tuple[str, ...], blocks: Iterable[Block], format: str) -> Iterator[str]:
    """The lines, in pieces of about a thousand. Each piece ends in a newline."""
    for alike, varying, rows, are_numbers in blocks:
        # One template per block. It already contains the columns that do not change.
        template = _template(columns, alike, varying, format)
        lines: list[str] = []
        for row in rows:
            lines.append(template % (row if are_numbers else tuple(_text(value, format) for value in row)))
            if len(lines) == _LINES_AT_ONCE:
                yield "".join(lines)
                lines.clear()
        if lines:
            yield "".join(lines)


def _template(columns: tuple[str, ...], alike: dict[str, Any], varying: tuple[str, ...], format: str) -> str:
    cells = ["%s" if name in varying else _text(alike[name], format).replace("%", "%%") for name in columns]
    if format == "jsonl":
        return "{" + ", ".join(f'"{name}": {text}' for name, text in zip(columns, cells)) + "}\n"
    return line(cells, format)


def _text(value: Any, format: str) -> str:
    """A value as the text of a cell."""
    if type(value) is int:
        return str(value)
    return json.dumps(value, allow_nan=False) if format == "jsonl" else cell(value, format)


_TABLES = ("models", "gpus", "files", "plans", "engines", "figures", "curve", "scores")


def tabulate(document: Mapping[str, object], format: str) -> str:
    """`document` as text with a header line. A document with a list of rows (`models`, `gpus`, ...) is a table.

    A null is an empty cell in csv, and `null` in tsv.
    """
    rows = _table(document) or [["path", "value"], *([path, value] for path, value in scalars(document))]
    return "".join(line([cell(value, format) for value in values], format) for values in rows)


def is_table(document: Mapping[str, object]) -> bool:
    """Whether `document` becomes a table. A table does not include the document's warnings."""
    return _table(document) is not None


def _table(document: Mapping[str, object]) -> list[list[Any]] | None:
    for key in _TABLES:
        rows = document.get(key)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return [list(rows[0]), *(list(row.values()) for row in rows)]
    return None
