"""Text from outside in a form that a terminal shows and does not obey."""

from __future__ import annotations

from typing import Any

_KEPT = "\n\t"  # one_line replaces these
_BREAKS = str.maketrans("\t\n", "  ")


def printable(text: str) -> str:
    """`text` with control characters, invisible characters and lone surrogates as escapes: `\\\\x1b` for ESC."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _KEPT else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text` in one printable line: spaces replace tabs and newlines."""
    return printable(text.translate(_BREAKS))


def printable_document(value: Any) -> Any:
    """A document with `one_line` applied to every string in it, keys included."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {printable_document(key): printable_document(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):  # a named tuple, such as the chart of a sweep
        return value._make(map(printable_document, value))
    return type(value)(map(printable_document, value)) if isinstance(value, (list, tuple)) else value
