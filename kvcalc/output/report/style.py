"""The style of a report: readable on a telephone and on a wide screen, in light and dark, and on paper."""

from __future__ import annotations

from pathlib import Path

# The classes f0 to f6 fill with a colour and s0 to s6 draw with it; f7 is for what is free.
NUM_COLORS = 7
# Dashes, so that lines differ without colour too.
_DASHES = (None, "8 4", "2 3", "10 3 2 3", "5 5", "1 3", "12 6")


def stroke(number: int) -> dict[str, object]:
    """The attributes of the line with this number."""
    return {"class_": f"line s{number % NUM_COLORS}", "stroke_dasharray": _DASHES[number % len(_DASHES)]}


# The colours of series are those of Okabe and Ito (Color universal design, 2008), which colour-blind readers can tell
# apart, made lighter for dark screens. Lines also differ in their dashes.
STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
