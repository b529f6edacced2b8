"""`kvcalc sweep` for a person: the first rows, and memory over context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.chart import draw_chart
from kvcalc.output.human.console import count, duration, plain_table, rate, size

# (heading, key, how it is printed); the first of these stand only where they change, the last only where one is known.
_Column = tuple[str, str, Callable[[Any], str]]
_CHANGING: tuple[_Column, ...] = (
    ("engine", "engine", str), ("KV type", "kv_dtype", str), ("device", "gpu", str),
    ("tp", "tensor_parallel_size", count), ("batch", "batch_size", count),
)  # fmt: skip
_ALWAYS: tuple[_Column, ...] = (
    ("context", "context_tokens", count), ("total", "total_bytes", size), ("per token", "bytes_per_token", size),
)  # fmt: skip


def render(document: dict[str, Any], console: Console) -> None:
    """Print the document with `points` cut to the first rows, and its `chart`."""
    points = document["points"]
    changing = [c for c in _CHANGING if len({point[c[1]] for point in points}) > 1]
    alike = [key for _, key, _ in _CHANGING if key not in {c[1] for c in changing}]
    constant = [_constant(key, points[0][key]) for key in alike if points[0][key] is not None]
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {', '.join(constant)}"))
    console.print()
    columns: list[_Column] = [*changing, *_ALWAYS]
    if any(point["tensor_parallel_size"] > 1 for point in points):
        columns.append(("per device", "bytes_per_device", size))
    if any(point["decode_step_seconds"] is not None for point in points):
        columns += [("step", "decode_step_seconds", duration), ("tok/s", "decode_tokens_per_second", rate)]
    has_fits = any(point["fits"] is not None for point in points)
    table = plain_table(*((heading, "left" if print_ is str else "right") for heading, _, print_ in columns))
    if has_fits:
        table.add_column("fits")
    for point in points:
        cells = [print_(point[key]) for _, key, print_ in columns]
        if has_fits:
            cells.append({True: "yes", False: "no", None: "-"}[point["fits"]])
        table.add_row(*cells, style="dim" if point["reason"] else "")
    console.print(table)
    more = document["num_points"] - len(points)
    if more:
        console.print(f"and {count(more)} rows more: --format csv", style="dim")
    chart = draw_chart(document["chart"])
    if chart:
        console.print()
        for line in chart:
            console.print(line, soft_wrap=True)


def _constant(key: str, value: Any) -> str:
    return f"{ {'tensor_parallel_size': 'tp ', 'batch_size': 'batch '}.get(key, '') }{value}"
