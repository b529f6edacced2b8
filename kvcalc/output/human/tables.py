"""Text with styles, and tables without borders that fit the terminal: no name is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Union
from unicodedata import combining, east_asian_width

from kvcalc.output.wrapping import wrapped


class Text(str):
    """A text whose parts have styles: words such as `bold`, `dim` and `green`, or none."""

    parts: tuple[tuple[str, str], ...]

    def __new__(cls, text: str = "", style: str = "") -> Text:
        return cls.assemble((text, style))

    @classmethod
    def assemble(cls, *parts: Union[str, tuple[str, str]]) -> Text:
        """The text of all parts, one after the other."""
        pairs = tuple((part, "") if isinstance(part, str) else part for part in parts)
        text_made = str.__new__(cls, "".join(text for text, _ in pairs))
        text_made.parts = pairs
        return text_made


def cell_len(text: str) -> int:
    """The columns that a line takes: two for a wide character, none for an accent on the one before."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1 for character in text)


Column = tuple[str, str, Callable[[Any], str]]
"""A table column: its heading for `plain_table`, the key of its values, and the function that formats a value."""

_GAP = 2
# The first column is folded to this many characters before columns are left out, and to fewer after that.
_COMFORTABLE, _NARROWEST = 24, 14
# A column of text is broken between words if it is wider.
_WORDS = 20
# A name is folded after one of these characters.
_BREAKS = "/-_. "


class Table:
    """A table that `Console` makes fit. The first row has the headings.

    `labels` has a name for each column, and `optional` the names of those to leave out, the first one first. After
    them, columns of numbers are left out from the right.
    """

    def __init__(self, headings: Sequence[str], labels: Iterable[str], optional: Sequence[str]) -> None:
        self.labels, self.optional, self.comfortable = [*labels], optional, _COMFORTABLE
        self._is_right = [heading.startswith(">") for heading in headings]
        self._rows = [([heading.removeprefix(">") for heading in headings], "bold")]

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row. `style` is that of the whole row. Cells that are not given are empty."""
        self._rows.append(([*cells, *[""] * (len(self.labels) - len(cells))], style))

    def fit(self, width: int) -> list[str]:
        """Leave out columns and fold the first one until the table has `width` columns. Returns what was left out."""
        left_out: list[str] = []
        names = not self._is_right[0]
        while self._width(self.comfortable if names else None) > width and (place := self._next()) is not None:
            for cells, _ in self._rows:
                del cells[place]
            del self._is_right[place]
            left_out.append(self.labels.pop(place))
        if names and self._width() > width:
            room = max(width - self._width(0), _NARROWEST)
            for cells, _ in self._rows[1:]:
                cells[0] = fold(cells[0], room)
        return [label for label in left_out if label]

    def _next(self) -> int | None:
        """The number of the column to leave out next, or None if only the first one and text are left."""
        for label in self.optional:
            if label in self.labels[1:]:
                return self.labels.index(label, 1)
        numbers = [place for place, is_right in enumerate(self._is_right) if place and is_right]
        return numbers[-1] if len(self.labels) > 2 and numbers else None

    def _width(self, most_of_first: int | None = None) -> int:
        """The width of the table, with at most this width of the first column."""
        widest = self._widest(0)
        width = widest if most_of_first is None else min(widest, most_of_first)
        return width + sum(_GAP + self._least(place) for place in range(1, len(self.labels)))

    def _widest(self, place: int) -> int:
        return max(cell_len(line) for cells, _ in self._rows for line in cells[place].split("\n"))

    def _least(self, place: int, comfortable: int = _WORDS) -> int:
        """The least width of a column. Text that is wider than is comfortable may be broken between words."""
        widest = self._widest(place)
        if self._is_right[place] or widest <= comfortable or place == 0:
            return widest
        words = [word for cells, _ in self._rows for word in wrapped(cells[place], 1)]
        return max(min(widest, comfortable), *map(cell_len, words))

    def lines(self, width: int) -> Iterator[tuple[Text, str]]:
        """The lines of a table that fits, each with the style of its row."""
        least = [self._least(place, 0) for place in range(len(self.labels))]
        widths = [self._widest(place) for place in range(len(self.labels))]
        while sum(widths) + _GAP * (len(widths) - 1) > width and widths > least:
            widths[max(range(len(widths)), key=lambda place: (widths[place] > least[place], widths[place]))] -= 1
        for cells, style in self._rows[0 if any(self._rows[0][0]) else 1 :]:
            broken = [[cell] if "\n" not in cell and cell_len(cell) <= most else _broken(cell, most)
                      for cell, most in zip(cells, widths)]  # fmt: skip
            for line in zip_longest(*broken, fillvalue=""):
                yield self._joined(line, widths), style

    def _joined(self, cells: Sequence[str], widths: Sequence[int]) -> Text:
        parts: list[tuple[str, str]] = []
        for place, (cell, width) in enumerate(zip(cells, widths)):
            blanks, gap = " " * (width - cell_len(cell)), " " * _GAP if place else ""
            cell_parts = cell.parts if isinstance(cell, Text) else ((cell, ""),)
            parts += (
                [(gap + blanks, ""), *cell_parts] if self._is_right[place] else [(gap, ""), *cell_parts, (blanks, "")]
            )
        return Text.assemble(*parts)


def _broken(cell: str, width: int) -> list[str]:
    return [line for whole in cell.split("\n") for line in wrapped(whole, width)]


def plain_table(*headings: str, optional: Sequence[str] = ()) -> Table:
    """A table without borders. A `>` before a heading right-aligns its column. If all headings are empty, the header is
    not shown."""
    return Table(headings, [heading.removeprefix(">") for heading in headings], optional)


def table_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column], optional: Sequence[str] = ()) -> Table:
    """A table of a document's rows. Rows with a reason instead of figures are dim.

    A narrow terminal does not show the columns of the keys in `optional`, the first one first.
    """
    labels = {key: heading.removeprefix(">") or key for heading, key, _ in columns}
    headings = [heading for heading, _, _ in columns]
    table = Table(headings, [*labels.values()], [labels[key] for key in optional if key in labels])
    for row in rows:
        cells = [print_(row[key]) for _, key, print_ in columns]
        table.add_row(*cells, style="dim" if row.get("reason") else "")
    return table


def fold(name: str, width: int) -> str:
    """`name` in lines of at most `width`, broken after a separator if the line has one."""
    lines = []
    while len(name) > width:
        end = max((name.rfind(mark, 0, width) + 1 for mark in _BREAKS), default=0) or width
        lines.append(name[:end])
        name = name[end:]
    return "\n".join([*lines, name])
