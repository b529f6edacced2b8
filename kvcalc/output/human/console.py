"""The rich console and the few marks all human output shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcalc.units import format_count, format_size


def make_console(color: bool) -> Console:
    """A console on stdout: no colour off a terminal, with NO_COLOR or TERM=dumb (rich's own rules), or when told so.

    No markup, emoji or highlighting: model names hold brackets and colons, and numbers are ours to colour.
    """
    return Console(no_color=None if color else True, markup=False, emoji=False, highlight=False)


def plain_table(*columns: tuple[str, str]) -> Table:
    """A table without lines; `columns` are (heading, "left" or "right")."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]  # a Literal
    return table


def size(value: int | None) -> str:
    """Bytes in powers of 1024, or a dash."""
    return "-" if value is None else format_size(value)


def count(value: Any) -> str:
    """A number with thousands separated, or a dash."""
    return "-" if value is None else format_count(value)


def duration(seconds: float | None) -> str:
    """Seconds with three figures, in milliseconds below one second, or a dash."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def rate(value: float | None) -> str:
    """So many a second: whole from a hundred on, three figures below, or a dash."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def split(sizes: Mapping[str, Any]) -> str:
    """`tp 8 x pp 2`: what a replica is split over; empty where it is one device."""
    parts = (("tp", sizes["tensor_parallel_size"]), ("pp", sizes["pipeline_parallel_size"]))
    return " x ".join(f"{name} {size}" for name, size in parts if size > 1)
