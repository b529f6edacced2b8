"""`kvcalc gpus` for a person."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import plain_table
from kvcalc.units import format_size

_CAPTION = """16 bit (bf16, or fp16 where there is none) and fp8: dense TFLOPS. link: GB/s out of one
device, and how many are joined; kvcalc gpus show NAME says the rest, and the source"""


def render(document: dict[str, Any], console: Console) -> None:
    """Print the list, a heading for each vendor, in 80 columns."""
    table = plain_table(
        ("device", "left"), ("memory", "right"), ("GB/s", "right"), ("16 bit", "right"), ("fp8", "right"),
        ("link", "right"),
    )  # fmt: skip
    for vendor, rows in groupby(document["gpus"], lambda row: row["vendor"]):
        table.add_row(Text(vendor, "bold"))
        for row in rows:
            table.add_row(
                f"  {row['name']}",
                format_size(row["memory_bytes"], capacity=True),
                figure(row["bandwidth_bytes_per_second"], 10**9),
                figure(row["half_flops_per_second"], 10**12),
                figure(row["fp8_flops_per_second"], 10**12),
                link(row["interconnect_bytes_per_second"], row["interconnect_devices"]),
            )
    console.print(table)
    console.print(_CAPTION)


def link(bytes_per_second: int | None, devices: int | None) -> str:
    """What joins devices: one direction of one device, and how many it joins."""
    return "-" if devices is None else f"{figure(bytes_per_second, 10**9)} x {devices:,}"


def figure(value: int | None, scale: int) -> str:
    """A published figure in units of `scale`, with a decimal only where it has one; a dash for none."""
    if not value:
        return "-"
    return f"{value / scale:,.1f}".removesuffix(".0")
