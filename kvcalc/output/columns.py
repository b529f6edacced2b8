"""A small chart in the terminal: one column of marks per value, in plain characters and without colour."""

from __future__ import annotations

from collections.abc import Sequence

HEIGHT = 4
_GUTTER = 11


def draw_columns(title: str, values: Sequence[int], end: str) -> list[str]:
    """The lines of a chart of `values`, at least one of them above 0. `end` labels the end of the horizontal axis."""
    most = max(values)
    lines = [f"{'':>{_GUTTER}}  {title}"]
    for height in range(HEIGHT, 0, -1):
        # A value above 0 has a mark in the lowest row.
        marks = "".join("#" if value * HEIGHT > (height - 1) * most else " " for value in values)
        label = f"{most:,}" if height == HEIGHT else ""
        lines.append(f"{label:>{_GUTTER}} |{marks.rstrip()}")
    lines.append(f"{'0':>{_GUTTER}} +{'-' * len(values)}")
    lines.append(f"{'':>{_GUTTER}}  0{end:>{len(values) - 1}}")
    return lines
