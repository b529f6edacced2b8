"""`kvcalc measure --sweep` for a person: a row for every point, with a bar for the time of its step."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcalc.output.human.console import count, plain_table
from kvcalc.output.human.measure_format import percent, rate, seconds

_BAR_COLUMNS = 20


def render(document: dict[str, Any], console: Console) -> None:
    """Print the curve: bars are to one scale, the longest step a full one."""
    rows = document["curve"]
    longest = max(row["decode_step_seconds"] for row in rows)
    table = plain_table(
        ("", "left"), ("tokens", "right"), ("batch", "right"), ("step p50", "right"), ("", "left"),
        ("tokens/s", "right"), ("KV read", "right"), ("of roof", "right"),
    )  # fmt: skip
    last = None
    for row in rows:
        kind = row["attention"].upper()
        table.add_row(
            "" if kind == last else kind,
            count(row["context_tokens"]),
            count(row["batch_size"]),
            seconds(row["decode_step_seconds"]),
            "#" * max(1, round(_BAR_COLUMNS * row["decode_step_seconds"] / longest)),
            f"{row['tokens_per_second']:,.0f}",
            rate(row["kv_read_bytes_per_second"]),
            percent(row["fraction_of_roof"]),
        )
        last = kind
    console.print(table)
