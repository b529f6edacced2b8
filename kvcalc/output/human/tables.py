"""Tables without borders that fit the terminal: columns are left out before a name is folded, and no name is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rich.table
from rich.cells import cell_len
from rich.console import Console

Column = tuple[str, str, Callable[[Any], str]]
"""A table column: its heading for `plain_table`, the key of its values, and the function that formats a value."""

_GAP = 2
# The first column is folded to this many characters before columns are left out, and to fewer after that.
_COMFORTABLE, _NARROWEST = 24, 14
# A column of text is broken between words if it is wider.
_WORDS = 20
# A name is folded after one of these characters.
_BREAKS = "/-_. "


class Table(rich.table.Table):
    """A table that `PlainConsole` makes fit.

    `labels` has a name for each column, and `optional` the names of those to leave out, the first one first. After
    them, columns of numbers are left out from the right.
    """

    labels: list[str]
    optional: Sequence[str]
    comfortable = _COMFORTABLE

    def fit(self, width: int) -> list[str]:
        """Leave out columns and fold the first one until the table has `width` columns. Returns what was left out."""
        left_out: list[str] = []
        names = self.columns[0].justify == "left"
        for column in self.columns:
            column.no_wrap = column is self.columns[0] or self._least(column) == self._widest(column)
        while self._width(self.comfortable if names else None) > width and (place := self._next()) is not None:
            del self.columns[place]
            left_out.append(self.labels.pop(place))
        if names and self._width() > width:
            room = max(width - self._width(0), _NARROWEST)
            first = self.columns[0]
            first._cells[:] = [fold(cell, room) if isinstance(cell, str) else cell for cell in first._cells]
        for place, each in enumerate(self.columns):
            each._index = place
        return [label for label in left_out if label]

    def _next(self) -> int | None:
        """The number of the column to leave out next, or None if only the first one and text are left."""
        for label in self.optional:
            if label in self.labels[1:]:
                return self.labels.index(label, 1)
        numbers = [place for place, column in enumerate(self.columns) if place and column.justify == "right"]
        return numbers[-1] if len(self.columns) > 2 and numbers else None

    def _width(self, most_of_first: int | None = None) -> int:
        """The width of the table, with at most this width of the first column."""
        first, *others = self.columns
        widest = self._widest(first)
        own = widest if most_of_first is None else min(widest, most_of_first)
        return own + sum(_GAP + self._least(column) for column in others)

    def _widest(self, column: rich.table.Column) -> int:
        texts = [str(cell) for cell in column._cells]
        texts += [str(column.header)] if self.show_header else []
        return max((cell_len(line) for text in texts for line in text.split("\n")), default=0)

    def _least(self, column: rich.table.Column) -> int:
        """The least width of a column. Text that is wider than a few words may be broken between words."""
        widest = self._widest(column)
        if column.justify == "right" or widest <= _WORDS or column is self.columns[0]:
            return widest
        words = [word for cell in column._cells for word in str(cell).split()]
        return max(min(widest, _WORDS), *map(cell_len, words))


def plain_table(*headings: str, optional: Sequence[str] = ()) -> Table:
    """A table without borders. A `>` before a heading right-aligns its column. If all headings are empty, the header is
    not shown."""
    has_header = any(heading.strip(">") for heading in headings)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_header=has_header)
    table.labels, table.optional = [heading.removeprefix(">") for heading in headings], optional
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table


def table_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], optional: Sequence[str] = ()) -> Table:
    """A table of a document's rows. Rows with a reason instead of figures are dim.

    A narrow terminal does not show the columns of the keys in `optional`, the first one first.
    """
    labels = {key: heading.removeprefix(">") or key for heading, key, _ in columns}
    table = plain_table(
        *(heading for heading, _, _ in columns), optional=[labels[key] for key in optional if key in labels]
    )
    table.labels = list(labels.values())
    for row in rows:
        cells = [print_(row[key]) for _, key, print_ in columns]
        table.add_row(*cells, style="dim" if row.get("reason") else "")
    return table


def print_table(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], console: Console, optional: Sequence[str] = ()
) -> None:
    """Print `table_of` rows."""
    console.print(table_of(rows, columns, optional))


def fold(name: str, width: int) -> str:
    """`name` in lines of at most `width`, broken after a separator if the line has one."""
    lines = []
    while len(name) > width:
        end = max((name.rfind(mark, 0, width) + 1 for mark in _BREAKS), default=0) or width
        lines.append(name[:end])
        name = name[end:]
    return "\n".join([*lines, name])
