"""Text from outside (names of files, presets and models, lines of logs) in a form that is safe to print."""

from __future__ import annotations

from typing import Any

_KEPT = "\n\t"  # each format replaces these in its own way
# A spreadsheet takes a cell that starts with one of these for a formula (CSV injection, OWASP).
_FORMULA = ("=", "+", "-", "@")


def printable(text: str) -> str:
    """`text` with control characters, invisible characters and lone surrogates as escapes: `\\\\x1b` for ESC."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else ascii(c)[1:-1] for c in text)


def printable_document(value: Any) -> Any:
    """A document with `printable` applied to every string in it, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_document(key): printable_document(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple, such as the chart of a sweep
        return value._make(map(printable_document, value))
    return type(value)(map(printable_document, value)) if isinstance(value, (list, tuple)) else value


def csv_text(value: str) -> str:
    """A string as a cell of csv: with a leading apostrophe if a spreadsheet would take it for a formula."""
    return f"'{value}" if value.startswith(_FORMULA) else value
