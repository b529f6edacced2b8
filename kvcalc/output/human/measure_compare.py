"""Human output of `kvcalc measure --compare`: what differs, then every figure of both records with its ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import byte_rate, duration
from kvcalc.output.human.tables import plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents


def render(document: documents.MeasureCompare, console: Console) -> None:
    """Print the compare document."""
    for letter, side in (("a", document["a"]), ("b", document["b"])):
        taken = f", {side['taken_at']}" if side["taken_at"] else ""
        console.print(f"{letter.upper()}  {side['file']}: {side['model']} on {side['device']}{taken}")
    if document["differences"]:
        console.print()
        table = plain_table("differs", "A", "B")
        for row in document["differences"]:
            table.add_row(row["path"], _bare(row["a"]), _bare(row["b"]))
        console.print(table)
    console.print()
    table = plain_table("", "figure", ">A", ">B", ">B/A")
    last = None
    for one in document["figures"]:
        kind = (one["attention"] or "").upper()
        values = [_value(one["figure"], value) for value in (one["a"], one["b"])]
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        table.add_row("" if kind == last else kind, one["figure"], *values, ratio)
        last = kind
    console.print(table)
    for left in document["left_out"]:
        console.print(f"{left['attention'].upper()} left out: {left['reason']}", style="dim")


def _value(figure: str, value: float) -> str:
    """A figure in the unit that its path names."""
    parts = figure.split(".")
    if any(part.endswith("bytes_per_second") for part in parts):
        return byte_rate(value)
    if any(part.startswith("fraction_of_") for part in parts):
        return f"{value:.1%}"
    if any(part.endswith("_seconds") for part in parts):
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _bare(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        return "-" if value is None else str(value)
    return f"{value:,}"
