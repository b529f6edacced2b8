"""The picture of a terminal in README.md: an SVG made from what a command prints."""

from __future__ import annotations

from kvcalc.writing.html import element, joined
from tests.conftest import ROOT

PICTURE = ROOT / "docs" / "start" / "fit.svg"
COMMAND = "kvcalc fit llama-3-70b --gpu h100x4 --engine vllm --context 8192 --batch 32"
_LINE, _COLUMN, _EDGE = 18, 8.2, 14


def picture(command: str, printed: str) -> str:
    """The SVG of a terminal of 80 columns with a command and what it printed."""
    lines = [f"$ {command}", *printed.rstrip().splitlines()]
    width, height = round(80 * _COLUMN + 2 * _EDGE), _LINE * len(lines) + 2 * _EDGE
    drawn = [element("rect", width=width, height=height, rx=8, fill="#0d1117")]
    for place, line in enumerate(lines):
        color = "#56d364" if line.startswith("fits") else "#e6edf3" if place < 2 else "#b6c2cf"
        drawn.append(element("text", line, x=_EDGE, y=_EDGE + _LINE * (place + 0.75), fill=color, xml_space="preserve"))
    inner = joined([element("title", command), *drawn])
    font = "13.6px ui-monospace, 'SF Mono', Menlo, Consolas, monospace"
    svg = element(
        "svg", inner, viewBox=f"0 0 {width} {height}", xmlns="http://www.w3.org/2000/svg", style=f"font: {font}"
    )
    return svg.replace("xml-space", "xml:space") + "\n"
