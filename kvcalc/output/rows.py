"""Print rows as they are computed: csv, tsv, JSON lines, or a list in one document. Few rows are held in memory."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kvcalc.output.paths import bare, one_line
from kvcalc.output.text import csv_text

Block = tuple[dict[str, Any], tuple[str, ...], Iterable[tuple[Any, ...]], bool]
"""The columns that are the same in all rows, the names of the other columns, their values row by row, and whether all
these values are whole numbers."""

_LINES_AT_ONCE = 1024


def write_rows(columns: tuple[str, ...], blocks: Iterable[Block], format: str) -> None:
    """Print `blocks` under a header of `columns` (csv, tsv), or one object per line (jsonl)."""
    if format != "jsonl":
        sys.stdout.write(("," if format == "csv" else "\t").join(columns) + "\n")
    for piece in _pieces(columns, blocks, format):
        sys.stdout.write(piece)
    sys.stdout.flush()


def write_document(
    head: dict[str, Any], name: str, columns: tuple[str, ...], blocks: Iterable[Block], tail: dict[str, Any]
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
        return "{" + ", ".join(f'"{name}": {cell}' for name, cell in zip(columns, cells)) + "}\n"
    return ("," if format == "csv" else "\t").join(cells) + "\n"


def _text(value: Any, format: str) -> str:
    """A value as the text of a cell, quoted if the format needs it. A null is an empty cell in csv."""
    if type(value) is int:
        return str(value)
    if format == "jsonl":
        return json.dumps(value, allow_nan=False)
    if format == "csv" and value is None:
        return ""
    text = bare(value)
    if format == "tsv":
        return one_line(text)
    if text.isalnum():
        return text
    if isinstance(value, str):
        text = csv_text(text)
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()
