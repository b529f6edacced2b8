"""Human output of `kvcalc sweep`: the first rows, and a chart of memory over context."""

from __future__ import annotations

from typing import Any

from kvcalc.output.chart import draw_chart
from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, duration, rate, size, span, text, yes_or_no
from kvcalc.output.human.styled import Text
from kvcalc.output.human.tables import Column

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
