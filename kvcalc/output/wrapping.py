"""Text in lines of a given width, broken between words: never inside a name, or between a number and its unit."""

from __future__ import annotations

import re
import sys
from shutil import get_terminal_size
from textwrap import wrap

# Units, which stay on the line of their number. The parts of `16 x h100-sxm` stay together too.
_UNIT = re.compile(r"(?<=[\d)]) (?=(?:[KMGTP]?i?B(?:/s)?|[mu]?s|W|J|%|x \S+|tokens?|GPUs?)(?![\w-]))|(?<=\d x) (?=\S)")
# A blank that `textwrap` does not break at.
_GLUE = "\xa0"


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """The lines of `text`, the further ones after `indent`. A line is longer than `columns` only if a word is."""
    lines = wrap(
        _UNIT.sub(_GLUE, text), max(columns, 1), break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, subsequent_indent=indent,
    )  # fmt: skip
    return [line.replace(_GLUE, " ") for line in lines] or [""]


def tell(text: str) -> None:
    """Print one line on stderr, broken between words if stderr is a terminal."""
    lines = wrapped(text, get_terminal_size().columns - 1, "  ") if sys.stderr.isatty() else [text]
    print("\n".join(lines), file=sys.stderr)
