"""The console that all human output is printed on: lines and tables fit its width."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.tables import Table
from kvcalc.output.wrapping import wrapped

_LEAST_COLUMNS, _OFF_A_TERMINAL = 20, 80
# Without a height, rich takes 80 columns if TERM is dumb.
_HEIGHT = 25


class PlainConsole(Console):
    """A console whose lines break between words, and whose tables lose columns instead of parts of names.

    BrokenPipeError gets through, for `Output.emit` to handle. Rich's own console ends the process.
    """

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error

    def print(self, *objects: Any, style: Any = None, soft_wrap: bool | None = None, **others: Any) -> None:
        """Print one line of text or one table. With `soft_wrap`, a line is not broken."""
        one = objects[0] if len(objects) == 1 and not soft_wrap else None
        if isinstance(one, Table):
            left_out = one.fit(self.width)
            super().print(one, style=style, **others)
            if left_out:
                self.print(f"not shown at {self.width} columns: {', '.join(left_out)}", style="dim")
        elif isinstance(one, (str, Text)):
            whole = one if isinstance(one, Text) else Text(one)
            for part in whole.split("\n", allow_blank=True):
                for line in _lines(part, self.width):
                    super().print(line, style=style, soft_wrap=True, **others)
        else:
            super().print(*objects, style=style, soft_wrap=soft_wrap, **others)


def _lines(text: Text, width: int) -> list[Text]:
    """The lines of a text. The further lines of an indented one are indented too."""
    found, plain, place = [], text.plain, 0
    indent = len(plain) - len(plain.lstrip(" "))
    for line in wrapped(plain, width, "" if not indent else " " * (indent + 2)):
        words = line.strip(" ")
        place = plain.index(words, place)
        found.append(Text(" " * (len(line) - len(line.lstrip(" ")))) + text[place : place + len(words)])
        place += len(words)
    return found


def make_console(color: bool) -> Console:
    """A console on stdout. No colour if stdout is not a terminal, with NO_COLOR or TERM=dumb, or if `color` is false.

    It has $COLUMNS columns, else those of the terminal, and 80 in a pipe or a file. Markup, emoji and highlighting are
    off, because model names may contain brackets and colons.
    """
    is_terminal, columns = sys.stdout.isatty(), os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = max(int(columns), _LEAST_COLUMNS)
    else:
        width = shutil.get_terminal_size().columns if is_terminal else _OFF_A_TERMINAL
    return PlainConsole(
        no_color=None if color else True, markup=False, emoji=False, highlight=False, width=width, height=_HEIGHT,
        force_terminal=None if is_terminal else False,
    )  # fmt: skip
