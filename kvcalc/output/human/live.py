"""Human output of `kvcalc check --live`: what a running server measures, beside the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import duration
from kvcalc.output.human.tables import Text, plain_table

if TYPE_CHECKING:
    import kvcalc.documents as documents

_LABELS = {
    "input_tokens": "mean input tokens", "output_tokens": "mean output tokens", "ttft_mean_seconds": "mean TTFT",
    "tpot_mean_seconds": "mean TPOT",
}  # fmt: skip


def print_live(live: documents.Live, console: Console) -> None:
    """Print the `live` part of a check document."""
    console.print()
    served = [live["engine"], *([live["model"]] if live["model"] else [])]
    served += [f"{live['ranks']} ranks"] if live["ranks"] > 1 else []
    console.print(Text.assemble(("live", "bold"), f": {live['source']} ({', '.join(served)})"))
    table = plain_table("", ">server", ">predicted", "remark", optional=())
    for row in live["rows"]:
        label = _LABELS.get(row["name"], row["name"].replace("_", " "))
        label += " of one rank" if row["name"] == "cache_tokens" and live["ranks"] > 1 else ""
        table.add_row(label, _shown(row["name"], row["server"]), _shown(row["name"], row["predicted"]), row["remark"])
    console.print(table)
    for difference in live["differs"]:
        console.print(difference, style="bold yellow")


def _shown(name: str, value: float | None) -> str:
    """A value in the unit of its row, or a dash for None."""
    if value is None:
        return "-"
    if name.endswith("_seconds"):
        return duration(value)
    return f"{value:.0%}" if name in ("cache_usage", "prefix_hit_rate") else f"{value:,.0f}"
