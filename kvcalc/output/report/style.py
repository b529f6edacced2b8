"""The style of a report: readable on a telephone and on a wide screen, in light and dark, and on paper."""

from __future__ import annotations

import re
from pathlib import Path

from kvcalc.writing.html import Markup, element

# The classes f0 to f6 fill with a colour and s0 to s6 draw with it; f7 is for free memory.
NUM_COLORS = 7
# Dashes, so that lines differ without colour too.
_DASHES = (None, "8 4", "2 3", "10 3 2 3", "5 5", "1 3", "12 6")
# The colours of series are those of Okabe and Ito (Color universal design, 2008), which colour-blind readers can tell
# apart, made lighter for dark screens. Lines also differ in their dashes.
STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def dashes_of(number: int) -> str | None:
    """The dashes of the line with this number, None if it is solid."""
    return _DASHES[number % len(_DASHES)]


def stroke(number: int) -> dict[str, object]:
    """The attributes of the line with this number."""
    return {"class_": f"line s{number % NUM_COLORS}", "stroke_dasharray": dashes_of(number)}


def light_colors() -> dict[str, str]:
    """The colours on a white page, by their names in the style."""
    return dict(reversed(re.findall(r"--(\w+): (#\w+)", STYLE)))


def as_file(svg: Markup, width: int, height: int) -> Markup:
    """A chart as a file of its own, on white. Its colours are no variables, which few programs but browsers know."""
    colors = light_colors()
    rules = re.findall(r"^(?:svg [.t]|\.[fs]\d).*$", STYLE, re.MULTILINE)
    style = re.sub(r"var\(--(\w+)\)", lambda match: colors[match[1]], " ".join(rules))
    ground = element("rect", width="100%", height="100%", fill=colors["page"])
    return element(
        "svg", element("style", style), ground, svg, xmlns="http://www.w3.org/2000/svg", width=width, height=height,
        viewBox=f"0 0 {width} {height}",
    )  # fmt: skip
