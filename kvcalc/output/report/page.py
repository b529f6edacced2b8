"""The HTML of a report: its parts, and the page around them. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import Union

from kvcalc import __version__
from kvcalc.output.report.style import STYLE, stroke
from kvcalc.output.text import printable
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION


class Facts(NamedTuple):
    """Pairs of a name and a value."""

    rows: Sequence[tuple[str, str]]


class Table(NamedTuple):
    """A table. Columns whose heading starts with `>` are numbers, aligned at the right. `marked` is a row's index."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: int | None = None
    # The class of each row's swatch, if the table is the legend of a chart.
    swatches: Sequence[str] = ()


class Figure(NamedTuple):
    """A chart, as SVG that is already safe, the names of its lines, and the table with its figures."""

    svg: str
    table: Table
    legend: Sequence[str] = ()


class Code(NamedTuple):
    """Text to copy, such as commands."""

    text: str


class Text(NamedTuple):
    """A paragraph."""

    text: str


Part = Union[Facts, Table, Figure, Code, Text]


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


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="kvcalc $version">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
<p class="subtitle">$subtitle</p>
<p class="verdict $tone">$verdict</p>
</header>
$sections
<footer>
<h2>Repeat this</h2>
<pre><code>$command</code></pre>
<p>kvcalc $version, document $kind, schema version $schema</p>
</footer>
</main>
</body>
</html>
""")


def make_page(answer: Answer, kind: str, command: str) -> str:
    """The whole page."""
    sections = [*answer.sections]
    if answer.warnings:
        sections.append(Section("Notes", [Text(text) for text in answer.warnings]))
    return _PAGE.substitute(
        version=safe(__version__),
        title=safe(answer.title),
        style=STYLE,
        subtitle=safe(answer.subtitle),
        tone=safe(answer.tone),
        verdict=safe(answer.verdict),
        sections="\n".join(map(_section, sections)),
        command=safe(command),
        kind=safe(kind),
        schema=SCHEMA_VERSION,
    )


def safe(text: str) -> str:
    """Text as it may stand in HTML and in attributes, with control characters and invisible ones as escapes."""
    return escape(printable(text), quote=True)


def _section(section: Section) -> str:
    parts = "\n".join(map(_part, section.parts))
    return f"<section>\n<h2>{safe(section.title)}</h2>\n{parts}\n</section>"


def _part(part: Part) -> str:
    if isinstance(part, Facts):
        rows = "\n".join(f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in part.rows)
        return f"<dl>\n{rows}\n</dl>"
    if isinstance(part, Table):
        return _table(part)
    if isinstance(part, Figure):
        return f"<figure>\n{part.svg}\n{_legend(part.legend)}{_table(part.table)}\n</figure>"
    if isinstance(part, Code):
        return f"<pre><code>{safe(part.text)}</code></pre>"
    return f"<p>{safe(part.text)}</p>"


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 48 12" aria-hidden="true"><path {stroke(place)} d="M0 6H48"/></svg>{safe(name)}</li>'
        for place, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>\n' if items else ""


def _table(table: Table) -> str:
    numbers = [heading.startswith(">") for heading in table.headings]
    head = _cells("th", (heading.removeprefix(">") for heading in table.headings), numbers, ' scope="col"')
    rows = []
    for place, row in enumerate(table.rows):
        swatch = f'<span class="swatch {safe(table.swatches[place])}"></span>' if table.swatches else ""
        mark = ' class="marked"' if place == table.marked else ""
        rows.append(f"<tr{mark}>{_cells('td', row, numbers, '', swatch)}</tr>")
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{safe(table.caption)}">\n<table>\n'
        f"<caption>{safe(table.caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>\n</div>"
    )


def _cells(tag: str, texts: Iterable[str], numbers: Sequence[bool], more: str, first: str = "") -> str:
    found = []
    for place, (text, is_number) in enumerate(zip(texts, numbers)):
        kind = ' class="number"' if is_number else ""
        found.append(f"<{tag}{kind}{more}>{first if place == 0 else ''}{safe(text)}</{tag}>")
    return "".join(found)
