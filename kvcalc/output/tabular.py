"""tsv and csv: a list of items as a table, any other document as rows of path and value. Nothing is truncated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.output.paths import scalars
from kvcalc.writing.cells import cell, line

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
