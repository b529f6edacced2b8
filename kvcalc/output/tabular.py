"""tsv and csv: a list of items as a table, any other document as rows of path and value. Nothing is truncated."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvcalc.output.paths import bare, one_line, scalars
from kvcalc.output.text import csv_text

_TABLES = ("models", "gpus", "files", "plans", "engines", "figures", "curve", "scores")


def tabulate(document: dict[str, Any], format: str) -> str:
    """`document` as text with a header line. A document with a list of rows (`models`, `gpus`, ...) is a table.

    A null is an empty cell in csv, and `null` in tsv. In csv, an apostrophe precedes text that a spreadsheet would take
    for a formula.
    """
    rows = _table(document) or [["path", "value"], *([path, value] for path, value in scalars(document))]
    if format == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(
            ["" if cell is None else csv_text(bare(cell)) if isinstance(cell, str) else bare(cell) for cell in row]
            for row in rows
        )
        return buffer.getvalue()
    return "".join("\t".join(one_line(bare(cell)) for cell in row) + "\n" for row in rows)


def is_table(document: dict[str, Any]) -> bool:
    """Whether `document` becomes a table. A table does not include the document's warnings."""
    return _table(document) is not None


def _table(document: dict[str, Any]) -> list[list[Any]] | None:
    for key in _TABLES:
        rows = document.get(key)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return [list(rows[0]), *(list(row.values()) for row in rows)]
    return None
