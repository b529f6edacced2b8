"""`kvcalc sweep` for a person: the first rows, and memory over context."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.chart import draw_chart
from kvcalc.output.human.console import Column, count, duration, rate, size, table_of, text, yes_or_no

# A column only if its values differ; otherwise the heading names the one value, after the word in _WORDS.
_CHANGING: tuple[Column, ...] = (
    ("engine", "engine", text), ("KV type", "kv_dtype", text), ("device", "gpu", text),
    (">tp", "tensor_parallel_size", count), (">batch", "batch_size", count),
)  # fmt: skip
_WORDS = {"tensor_parallel_size": "tp ", "batch_size": "batch "}


def render(document: dict[str, Any], console: Console) -> None:
    """Print the document with `points` cut to the first rows, and its `chart`."""
    points = document["points"]
    columns = [column for column in _CHANGING if len({point[column[1]] for point in points}) > 1]
    alike = {key: points[0][key] for key in [c[1] for c in _CHANGING if c not in columns]}
    constant = [f"{_WORDS.get(key, '')}{value}" for key, value in alike.items() if value is not None]
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {', '.join(constant)}"))
    console.print()
    columns += [(">context", "context_tokens", count), (">total", "total_bytes", size)]
    columns.append((">per token", "bytes_per_token", size))
    if any(point["tensor_parallel_size"] > 1 for point in points):
        columns.append((">per device", "bytes_per_device", size))
    if any(point["decode_step_seconds"] is not None for point in points):
        columns += [(">step", "decode_step_seconds", duration), (">tok/s", "decode_tokens_per_second", rate)]
    if any(point["fits"] is not None for point in points):
        columns.append(("fits", "fits", yes_or_no))
    console.print(table_of(points, columns))
    more = document["num_points"] - len(points)
    if more:
        console.print(f"and {count(more)} rows more: --format csv", style="dim")
    chart = draw_chart(document["chart"])
    if chart:
        console.print()
        for line in chart:
            console.print(line, soft_wrap=True)
