"""Rows as they come, to csv, tsv or JSON lines, or inside one JSON document: nothing is held but a few lines."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from kvcalc.output.paths import bare, one_line

Block = tuple[dict[str, Any], tuple[str, ...], Iterable[tuple[Any, ...]], bool]
"""Columns all rows have alike, the names of the others, the rows' values of those, and whether these are all whole
numbers."""

_LINES_AT_ONCE = 1024


def write_rows(columns: tuple[str, ...], blocks: Iterable[Block], format: str) -> None:
    """Print `blocks` under a header of `columns` (csv, tsv), or an object a line (jsonl)."""
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
    """The lines, some hundred at a time, each piece ending in a newline."""
    for alike, varying, rows, are_numbers in blocks:
        # One template for a block: what its rows have alike is text in it.
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
    """A value as it stands in a cell: quoted where the format asks for it."""
    if type(value) is int:
        return str(value)
    if format == "jsonl":
        return json.dumps(value, allow_nan=False)
    text = bare(value)
    if format == "tsv":
        return one_line(text)
    if text.isalnum():
        return text
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([text])
    return buffer.getvalue()
