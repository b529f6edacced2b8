"""A chart in the terminal: memory over context, plain characters, no colour needed."""

from __future__ import annotations

from itertools import pairwise
from math import log2
from typing import Any

from kvcalc.units import format_size

WIDTH, HEIGHT = 60, 15
_MARKS = "abcdefghijklmnopqrstuvwxyz"
_GUTTER = 11

# Where the ends of an axis are this many times apart, it is logarithmic: a doubling is then a step.
_LOGARITHMIC = 8


def draw_chart(chart: dict[str, Any]) -> list[str]:
    """The lines of text of a chart; none where fewer than two contexts have bytes.

    `chart`: `contexts`, rising; `lines`, each a `label` and `bytes` (None where refused) at these contexts;
    `capacities`, the memory there is, each a `label` and `bytes`.
    """
    contexts, capacities = chart["contexts"], chart["capacities"]
    values = [value for line in chart["lines"] for value in line["bytes"] if value is not None]
    if len(contexts) < 2 or not any(values):
        return []
    values += [capacity["bytes"] for capacity in capacities]
    across = _Scale(contexts[0], contexts[-1], WIDTH)
    up = _Scale(min(value for value in values if value), max(values), HEIGHT)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for number, capacity in enumerate(capacities, 1):
        # Several memories have a number at the end of their lines.
        grid[up.place(capacity["bytes"])] = [*"-" * (WIDTH - 1), "-" if len(capacities) == 1 else str(number)]
    for mark, line in zip(_MARKS, chart["lines"]):
        _draw_line(grid, across, up, contexts, line["bytes"], mark)
    text = []
    for height in reversed(range(HEIGHT)):
        label = format_size(up.value(height)) if height % 7 == 0 else ""
        text.append(f"{label:>{_GUTTER}} |{''.join(grid[height]).rstrip()}")
    text.append(f"{'':>{_GUTTER}} +{'-' * WIDTH}")
    first, last = f"{contexts[0]:,}", f"{contexts[-1]:,} tokens"
    text.append(f"{'':>{_GUTTER}}  {first}{last:>{WIDTH - len(first)}}")
    text += [f"{mark:>{_GUTTER}}  {line['label']}" for mark, line in zip(_MARKS, chart["lines"])]
    for number, capacity in enumerate(capacities, 1):
        mark = "---" if len(capacities) == 1 else f"--{number}"
        size = format_size(capacity["bytes"], capacity=True)
        text.append(f"{mark:>{_GUTTER}}  {size} for the cache on a device  {capacity['label']}".rstrip())
    if chart["omitted"]:
        text.append(f"{'':>{_GUTTER}}  and {chart['omitted']:,} lines more, not drawn")
    return text


class _Scale:
    """Numbers onto `cells` places, logarithmic where its ends are far apart."""

    def __init__(self, low: int, high: int, cells: int) -> None:
        self._is_log = high >= _LOGARITHMIC * low
        self._cells = cells
        self._low = log2(low) if self._is_log else low
        self._span = (log2(high) if self._is_log else high) - self._low

    def position(self, value: float) -> float:
        """Where a value lies, 0 to cells - 1; below the scale's end at 0."""
        if self._is_log:
            value = log2(value) if value else self._low
        share = (value - self._low) / self._span if self._span else 0
        return min(max(share, 0), 1) * (self._cells - 1)

    def place(self, value: float) -> int:
        return round(self.position(value))

    def value(self, place: int) -> int:
        """What a place stands for."""
        value = self._low + self._span * place / (self._cells - 1)
        return round(2**value if self._is_log else value)


def _draw_line(
    grid: list[list[str]], across: _Scale, up: _Scale, contexts: list[int], values: list[int | None], mark: str
) -> None:
    """Marks where the values are, and dots between them."""
    points = [(across.position(c), up.position(v)) for c, v in zip(contexts, values) if v is not None]
    for (x, y), (next_x, next_y) in pairwise(points):
        for column in range(round(x) + 1, round(next_x)):
            height = round(y + (next_y - y) * (column - x) / (next_x - x))
            if grid[height][column] in " -":
                grid[height][column] = "."
    for x, y in points:
        cell = grid[round(y)][round(x)]
        # Lines that lie on each other: the first keeps its letter.
        if cell in " .-":
            grid[round(y)][round(x)] = mark
