"""The rich console, the tables and the number formats that all human output shares."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcalc.units import format_size

Column = tuple[str, str, Callable[[Any], str]]
"""A table column: its heading for `plain_table`, the key of its values, and the function that formats a value."""


_LEAST_COLUMNS, _OFF_A_TERMINAL = 20, 80
# Without a height, rich takes 80 columns if TERM is dumb.
_HEIGHT = 25


class _Console(Console):
    """A console that lets BrokenPipeError through, for `Output.emit` to handle. Rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while it handles the error


def make_console(color: bool) -> Console:
    """A console on stdout. No colour if stdout is not a terminal, with NO_COLOR or TERM=dumb, or if `color` is false.

    It has $COLUMNS columns, else those of the terminal, and 80 in a pipe or a file. Markup, emoji and highlighting are
    off, because model names may contain brackets and colons.
    """
    is_terminal, columns = sys.stdout.isatty(), os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = max(int(columns), _LEAST_COLUMNS)
    else:
        width = shutil.get_terminal_size().columns if is_terminal else _OFF_A_TERMINAL
    return _Console(
        no_color=None if color else True, markup=False, emoji=False, highlight=False, width=width, height=_HEIGHT,
        force_terminal=None if is_terminal else False,
    )  # fmt: skip


def plain_table(*headings: str) -> Table:
    """A table without borders. A `>` before a heading right-aligns its column. If all headings are empty, the header is
    not shown."""
    has_header = any(heading.strip(">") for heading in headings)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=has_header)
    for heading in headings:
        is_right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if is_right else "left", no_wrap=is_right)
    return table


def table_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[Column]) -> Table:
    """A table of a document's rows. Rows with a reason instead of figures are dim."""
    table = plain_table(*(heading for heading, _, _ in columns))
    for row in rows:
        cells = [print_(row[key]) for _, key, print_ in columns]
        table.add_row(*cells, style="dim" if row.get("reason") else "")
    return table


def size(value: int | None) -> str:
    """Bytes in powers of 1024, or a dash for None."""
    return "-" if value is None else format_size(value)


def count(value: Any) -> str:
    """A number with thousands separators, or a dash for None."""
    return "-" if value is None else f"{value:,}"


def text(value: str | None) -> str:
    """The text, or a dash if it is empty."""
    return value or "-"


def yes_or_no(value: bool | None) -> str:
    """yes, no, or a dash for None."""
    return {True: "yes", False: "no", None: "-"}[value]


def attention(kind: str | None) -> str:
    """A kind of attention, with MHA, MQA, GQA and MLA in capitals, or a dash for None."""
    return text(kind) if kind in (None, "hybrid", "none") else str(kind).upper()


def percent(share: float | None) -> str:
    """A share as a whole percentage, or a dash for None."""
    return "-" if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """Seconds with three digits, in milliseconds below one second, or a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def short_duration(seconds: float | None) -> str:
    """A duration with three digits, in microseconds below one millisecond, or a dash for None."""
    return f"{seconds * 1e6:.3g} us" if seconds is not None and seconds < 0.9995e-3 else duration(seconds)


def rate(value: float | None) -> str:
    """A rate per second: a whole number from 100 on, three digits below, or a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def byte_rate(bytes_per_second: float | None) -> str:
    """Bytes per second in powers of 1024, or a dash for None."""
    return "-" if bytes_per_second is None else f"{format_size(int(bytes_per_second), capacity=True)}/s"


def flop_rate(flop_per_second: float | None) -> str:
    """FLOP per second with three digits, in TFLOP/s or GFLOP/s, or a dash for None."""
    if flop_per_second is None:
        return "-"
    unit, scale = ("TFLOP/s", 1e12) if flop_per_second >= 0.9995e12 else ("GFLOP/s", 1e9)
    return f"{flop_per_second / scale:.3g} {unit}"


def split(sizes: Mapping[str, Any]) -> str:
    """How a replica is split, such as `tp 8 x pp 2` or `dp 4 x tp 2`. Empty if it uses one device."""
    parts = (
        ("dp", sizes["data_parallel_size"]),
        ("pcp", sizes.get("prefill_context_parallel_size", 1)),
        ("tp", sizes["tensor_parallel_size"]),
        ("pp", sizes["pipeline_parallel_size"]),
    )
    return " x ".join(f"{name} {size}" for name, size in parts if size > 1)


def describe_workload(workload: Mapping[str, Any]) -> list[str]:
    """The context and the batch as text, such as `8,192 tokens` and `batch 4`."""
    return [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]


def describe_images(workload: Mapping[str, Any]) -> list[str]:
    """The images of a request as text, such as `2 images of 2,691 tokens`. Empty without images."""
    images = workload["images"]
    if images is None:
        return []
    return [f"{count(images['count'])} {'image' if images['count'] == 1 else 'images'} of "
            f"{count(images['tokens_per_image'])} tokens"]  # fmt: skip


def name_engine(engine: Mapping[str, Any]) -> str:
    """The engine's name, the program that is counted if it has several, and the release.

    The release is the one that was asked for, or else the one that the rules are from, if any.
    """
    program = engine.get("program")
    return " ".join(str(value) for value in (engine["name"], program and f"({program})", engine["version"]) if value)
