"""The console that all human output is printed on: lines and tables fit its width.

Only a terminal has styles, so only there is rich imported, which knows what each kind of terminal can show.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from kvcalc.output.human.tables import Column, Table, Text, table_of
from kvcalc.output.wrapping import wrapped

_LEAST_COLUMNS, _OFF_A_TERMINAL = 20, 80
# Without a height, rich takes 80 columns if TERM is dumb.
_HEIGHT = 25


class Console:
    """Prints on stdout, `width` columns wide, with styles if `terminal` is a console of rich."""

    def __init__(self, width: int, terminal: Any = None) -> None:
        self.width, self._terminal = width, terminal

    def print(self, what: Union[str, Table] = "", style: str = "", soft_wrap: bool = False) -> None:
        """Print a text or a table. With `soft_wrap`, lines are not broken."""
        if isinstance(what, Table):
            left_out = what.fit(self.width)
            for row, styles in what.lines(self.width):
                self._write(row.rstrip(), styles or style, row)
            if left_out:
                self.print(f"not shown at {self.width} columns: {', '.join(left_out)}", style="dim")
            return
        styled = what if isinstance(what, Text) else None
        for whole in what.split("\n"):
            indent = len(whole) - len(whole.lstrip(" "))
            for line in [whole] if soft_wrap else wrapped(whole, self.width, " " * (indent + 2) if indent else ""):
                self._write(line, style, styled)
                styled = None  # the parts with a style are at the beginning

    def _write(self, line: str, style: str, styled: Text | None) -> None:
        if self._terminal is None:
            sys.stdout.write(f"{line}\n")
            return
        from rich.text import Text as Rich

        # The style of the text, not of printing, because some releases of rich then style the end of the line too.
        shown, place = Rich(line, style=style), 0
        for part, own in styled.parts if styled is not None else ():
            shown.stylize(own, place, place + len(part))
            place += len(part)
        self._terminal.print(shown, soft_wrap=True)


def make_console(color: bool) -> Console:
    """A console on stdout. No colour if stdout is not a terminal, with NO_COLOR or TERM=dumb, or if `color` is false.

    It has $COLUMNS columns, else those of the terminal, and 80 in a pipe or a file.
    """
    is_terminal, columns = sys.stdout.isatty(), os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = max(int(columns), _LEAST_COLUMNS)
    else:
        width = shutil.get_terminal_size().columns if is_terminal else _OFF_A_TERMINAL
    return Console(width, _terminal(color, width) if is_terminal else None)


def _terminal(color: bool, width: int) -> Any:
    """A console of rich. Markup, emoji and highlighting are off, because names may contain brackets and colons.

    BrokenPipeError gets through, for `Output.emit` to handle. Rich's own console ends the process.
    """
    from rich.console import Console as Rich

    class Terminal(Rich):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the error

    return Terminal(
        no_color=None if color else True, markup=False, emoji=False, highlight=False, width=width, height=_HEIGHT
    )


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], console: Console, optional: Sequence[str] = ()
) -> None:
    """Print `table_of` rows."""
    console.print(table_of(rows, columns, optional))
