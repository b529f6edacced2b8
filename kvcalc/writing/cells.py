"""Values as bare text, and as cells of csv and tsv."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kvcalc.writing.terminal import one_line, printable

# A spreadsheet takes a cell that starts with one of these for a formula, after white space too (CSV injection, OWASP).
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # noqa: RUF001 - the wide forms are meant
_SEPARATORS = {"csv": ",", "tsv": "\t"}


def bare(value: Any) -> str:
    """A value for scripts: strings without quotes and control characters, everything else as compact JSON."""
    if isinstance(value, str):
        return printable(value)
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def cell(value: Any, format: str) -> str:
    """A value as a cell of `csv` or `tsv`. A null is empty in csv, and `null` in tsv.

    In csv, an apostrophe precedes text that a spreadsheet would take for a formula. tsv has no quotes, so spaces
    replace tabs and newlines.
    """
    text = bare(value)
    if text.isalnum():
        return "" if value is None and format == "csv" else text
    if format == "tsv":
        return one_line(text)
    if isinstance(value, str) and text.lstrip().startswith(_FORMULA):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n') else text


def line(cells: Iterable[str], format: str) -> str:
    """A line of cells that `cell` has written."""
    return _SEPARATORS[format].join(cells) + "\n"
