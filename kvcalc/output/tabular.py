"""tsv and csv: a list of things as a table, any other document as rows of path and value. Nothing is cut."""

from __future__ import annotations

import csv
import io
from typing import Any

from kvcalc.output.paths import bare, one_line, scalars


def tabulate(document: dict[str, Any], format: str) -> str:
    """`document` as text with a header line. A list of rows (`models`, `gpus`, ...) is a table."""
    rows = _table(document) or [["path", "value"], *([path, bare(value)] for path, value in scalars(document))]
    if format == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(rows)
        return buffer.getvalue()
    return "".join("\t".join(one_line(cell) for cell in row) + "\n" for row in rows)


def is_table(document: dict[str, Any]) -> bool:
    """Whether `document` becomes a table, whose rows have no room for its warnings."""
    return _table(document) is not None


def _table(document: dict[str, Any]) -> list[list[str]] | None:
    keys = ("models", "gpus", "files", "engines", "plans", "figures", "curve")
    rows = next((document[key] for key in keys if document.get(key)), None)
    if not isinstance(rows, list):
        return None
    return [list(rows[0]), *([bare(value) for value in row.values()] for row in rows)]
