"""The HTML of a report: its parts, and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Union

from kvcalc import __version__
from kvcalc.output.report.style import STYLE
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.writing.html import Markup, element, joined, page

# The rows of a chart's table that are shown at once, and the characters of a cell on one line.
_MOST_UNFOLDED, _LONGEST_CELL = 12, 24


class Table(NamedTuple):
    """A table. Columns whose heading starts with `>` are numbers, aligned at the right. `marked` is a row's index."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    # The class of each row's swatch, if the table is the legend of a chart.
    swatches: Sequence[str] = ()


Part = Union[Table, Markup]


class Section(NamedTuple):
    """A heading and its parts."""

    title: str
    parts: Sequence[Part]


class Answer(NamedTuple):
    """What a report shows. `tone` is good, bad or plain, and colours the verdict."""

    title: str
    subtitle: str
    verdict: str
    tone: str
    sections: Sequence[Section]
    warnings: Sequence[str] = ()


def make_page(answer: Answer, kind: str, command: str) -> str:
    """The whole page."""
    sections = [*answer.sections]
    if answer.warnings:
        sections.append(Section("Notes", [paragraph(text) for text in answer.warnings]))
    header = [
        element("h1", answer.title),
        element("p", answer.subtitle, class_="subtitle"),
        element("p", answer.verdict, class_=f"verdict {answer.tone}"),
    ]
    footer = [
        element("h2", "Repeat this"),
        code(command),
        element("p", f"kvcalc {__version__}, document {kind}, schema version {SCHEMA_VERSION}"),
    ]
    parts = [_around("header", header), *map(_section, sections), _around("footer", footer)]
    return page(answer.title, f"kvcalc {__version__}", STYLE, _around("main", parts))


def _around(name: str, parts: Iterable[str], **attributes: object) -> Markup:
    """An element around parts on lines of their own."""
    return element(name, joined(["", *parts, ""]), **attributes)


def _section(section: Section) -> Markup:
    parts = (_table(part) if isinstance(part, Table) else part for part in section.parts)
    return _around("section", [element("h2", section.title), *parts])


def paragraph(text: str) -> Markup:
    """A paragraph."""
    return element("p", text)


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Pairs of a name and a value."""
    return _around("dl", (joined([element("dt", name), element("dd", value)], "") for name, value in rows))


def figure(svg: Markup, table: Table | None) -> Markup:
    """A chart and the table with its figures, unless another chart has it. A reader opens one with many rows."""
    parts = [svg, *([] if table is None else [_table(table)])]
    if table is not None and len(table.rows) > _MOST_UNFOLDED:
        summary = element("summary", f"{table.caption}: {len(table.rows):,} rows")
        parts[1] = _around("details", [summary, parts[1]])
    return _around("figure", parts)


def code(text: str) -> Markup:
    """Text to copy. A line breaks between words, never at the hyphens of an option."""
    lines = ([element("span", word) if "-" in word else word for word in line.split(" ")] for line in text.split("\n"))
    return element("pre", element("code", joined(joined(words, " ") for words in lines)))


def _table(table: Table) -> Markup:
    numbers = [heading.startswith(">") for heading in table.headings]
    head = _cells("th", [heading.removeprefix(">") for heading in table.headings], numbers, scope="col")
    rows = []
    for place, row in enumerate(table.rows):
        swatch = [element("span", class_=f"swatch {table.swatches[place]}")] if table.swatches else []
        cells = _cells("td", row, numbers, swatch)
        rows.append(element("tr", *cells, class_="marked" if place == table.marked else None))
    parts = [element("caption", table.caption), element("thead", element("tr", *head)), _around("tbody", rows)]
    label = {"tabindex": 0, "role": "region", "aria_label": table.caption}
    return _around("div", [_around("table", parts)], class_="scroll", **label)


def _cells(
    name: str, texts: Sequence[str], numbers: Sequence[bool], first: Sequence[Markup] = (), **attributes: object
) -> list[Markup]:  # fmt: skip
    """Cells of a row. `first` comes before the text of the first one."""
    return [
        element(name, *(first if place == 0 else ()), text, class_=_kind(text, is_number), **attributes)
        for place, (text, is_number) in enumerate(zip(texts, numbers))
    ]


def _kind(text: str, is_number: bool) -> str | None:
    """The class of a cell: numbers are aligned, and long text may break between words."""
    return "number" if is_number else "words" if len(text) > _LONGEST_CELL else None
