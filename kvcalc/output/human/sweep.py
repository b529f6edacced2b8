"""Human output of `kvcalc sweep`: the first rows, and a chart of memory over context."""

from __future__ import annotations

from itertools import pairwise, zip_longest
from math import log2
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, duration, rate, size, span, text, yes_or_no
from kvcalc.output.human.tables import Column, Text
from kvcalc.output.wrapping import wrapped
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

# A column is printed only if its values differ. Otherwise the heading shows the value, after the word in _WORDS.
_CHANGING: tuple[Column, ...] = (
    ("engine", "engine", text), ("KV type", "kv_dtype", text), ("device", "gpu", text),
    (">devices", "num_devices", count), (">tp", "tensor_parallel_size", count), (">dp", "data_parallel_size", count),
    (">batch", "batch_size", count),
)  # fmt: skip
_WORDS = {"tensor_parallel_size": "tp ", "data_parallel_size": "dp ", "batch_size": "batch "}


def render(document: dict[str, Any], console: Console) -> None:
    """Print the document and its `chart`. `points` has only the first rows."""
    points = [
        {**point, "range": span(*(point[f"decode_step_{end}seconds"] for end in ("", "low_", "high_")))}
        for point in document["points"]
    ]
    columns = [column for column in _CHANGING if len({point[column[1]] for point in points}) > 1]
    if all(
        point["num_devices"] in (None, point["tensor_parallel_size"] * point["data_parallel_size"]) for point in points
    ):
        columns = [column for column in columns if column[1] != "num_devices"]
    alike = {key: points[0][key] for _, key, _ in _CHANGING if key not in [column[1] for column in columns]}
    constant = [f"{_WORDS.get(key, '')}{value}" for key, value in alike.items() if _says(key, value)]
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {', '.join(constant)}"))
    console.print()
    columns += [(">context", "context_tokens", count), (">total", "total_bytes", size)]
    columns.append((">per token", "bytes_per_token", size))
    if any(point["tensor_parallel_size"] * point["data_parallel_size"] > 1 for point in points):
        columns.append((">per device", "bytes_per_device", size))
    if any(point["decode_step_seconds"] is not None for point in points):
        columns += [(">step", "decode_step_seconds", duration), (">80% range", "range", text)]
        columns.append((">tok/s", "decode_tokens_per_second", rate))
    if any(point["fits"] is not None for point in points):
        columns.append(("fits", "fits", yes_or_no))
    print_table(points, columns, console, ("bytes_per_token", "range", "total_bytes", "decode_tokens_per_second"))
    more = document["num_points"] - len(points)
    if more:
        console.print(f"{count(more)} more rows: --format csv prints all of them", style="dim")
    chart = draw_chart(document["chart"], console.width)
    if chart:
        console.print()
        for line in chart:
            console.print(line, soft_wrap=True)


def _says(key: str, value: Any) -> bool:
    """Whether a value that all rows share belongs in the heading. The number of devices follows from the layout."""
    return value is not None and key != "num_devices" and (key != "data_parallel_size" or value > 1)


# A chart in the terminal: memory over context, in plain characters and without colour.

_WIDTH, _HEIGHT = 60, 15
_MARKS = "abcdefghijklmnopqrstuvwxyz"
# The marks of capacities, each drawn as a line across the chart. They differ from the marks of caches and from the dot.
_LIMITS = "-=~_+*:#"
_GUTTER = 11

# An axis is logarithmic if its ends are this many times apart: a doubling is then one step.
_LOGARITHMIC = 8


def draw_chart(chart: documents.Chart, columns: int) -> list[str]:
    """The lines of text of a chart in at most `columns` columns; none if fewer than two contexts have bytes.

    `chart` has `contexts` in ascending order; `lines`, each with a `label` and the `bytes` (None if refused) at these
    contexts; and `capacities`, the memory of devices, each with a `label` and `bytes`.
    """
    contexts, capacities = chart["contexts"], chart["capacities"]
    width = min(_WIDTH, columns - _GUTTER - 2)
    values = [value for line in chart["lines"] for value in line["bytes"] if value is not None]
    if len(contexts) < 2 or not any(values):
        return []
    values += [capacity["bytes"] for capacity in capacities]
    across = _Scale(contexts[0], contexts[-1], width)
    up = _Scale(min(value for value in values if value), max(values), _HEIGHT)
    grid = [[" "] * width for _ in range(_HEIGHT)]
    _draw_limits(grid, [up.place(capacity["bytes"]) for capacity in capacities])
    for mark, line in zip(_MARKS, chart["lines"]):
        _draw_line(grid, across, up, contexts, line["bytes"], mark)
    text = []
    for height in reversed(range(_HEIGHT)):
        label = format_size(up.value(height)) if height % 7 == 0 else ""
        text.append(f"{label:>{_GUTTER}} |{''.join(grid[height]).rstrip()}")
    text.append(f"{'':>{_GUTTER}} +{'-' * width}")
    first, last = f"{contexts[0]:,}", f"{contexts[-1]:,} tokens"
    text.append(f"{'':>{_GUTTER}}  {first}{last:>{width - len(first)}}")
    text += [f"{mark:>{_GUTTER}}  {line['label']}" for mark, line in zip(_MARKS, chart["lines"])]
    for mark, capacity in zip(_LIMITS, capacities):
        size = format_size(capacity["bytes"], capacity=True)
        words = f"{size} per device for the cache  {capacity['label']}".rstrip()
        lines = zip_longest([mark * 3], wrapped(words, columns - _GUTTER - 2), fillvalue="")
        text += [f"{left:>{_GUTTER}}  {right}" for left, right in lines]
    if chart["omitted"]:
        text.append(f"{'':>{_GUTTER}}  {chart['omitted']:,} more lines are not drawn")
    return text


class _Scale:
    """Maps numbers to `cells` places; logarithmic if its ends are far apart."""

    def __init__(self, low: int, high: int, cells: int) -> None:
        self._is_log = high >= _LOGARITHMIC * low
        self._cells = cells
        self._low = log2(low) if self._is_log else low
        self._span = (log2(high) if self._is_log else high) - self._low

    def position(self, value: float) -> float:
        """The place of a value, from 0 to cells - 1. Values below the scale are at 0."""
        if self._is_log:
            value = log2(value) if value else self._low
        share = (value - self._low) / self._span if self._span else 0
        return min(max(share, 0), 1) * (self._cells - 1)

    def place(self, value: float) -> int:
        return round(self.position(value))

    def value(self, place: int) -> int:
        """The value at a place."""
        value = self._low + self._span * place / (self._cells - 1)
        return round(2**value if self._is_log else value)


def _draw_limits(grid: list[list[str]], heights: list[int]) -> None:
    """Draw a line with its own mark for each limit. Limits at the same height share a line."""
    for height in set(heights):
        marks = [mark for mark, height_of_mark in zip(_LIMITS, heights) if height_of_mark == height]
        grid[height] = [marks[column // 2 % len(marks)] for column in range(len(grid[0]))]


def _draw_line(
    grid: list[list[str]], across: _Scale, up: _Scale, contexts: list[int], values: list[int | None], mark: str
) -> None:
    """Draw marks at the values, and dots between them."""
    points = [(across.position(c), up.position(v)) for c, v in zip(contexts, values) if v is not None]
    for (x, y), (next_x, next_y) in pairwise(points):
        for column in range(round(x) + 1, round(next_x)):
            height = round(y + (next_y - y) * (column - x) / (next_x - x))
            if grid[height][column] in f" {_LIMITS}":
                grid[height][column] = "."
    for x, y in points:
        cell = grid[round(y)][round(x)]
        # If lines share a place, the first one keeps its letter.
        if cell in f" .{_LIMITS}":
            grid[round(y)][round(x)] = mark
