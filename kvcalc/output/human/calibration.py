"""Human output of factors that were fitted to measured times: what changed, and the errors before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import percent
from kvcalc.output.human.tables import Table, Text

if TYPE_CHECKING:
    import kvcalc.documents as documents

_METRICS = {"tpot": "TPOT", "ttft": "TTFT"}
_CONSTANTS = {
    "step": "launches and host time per step",
    "sequence": "time per running sequence",
    "prefill": "multiplying, most of it for prompts",
    "communication": "communication between devices",
    "reading": "reading weights and cache",
    "waiting": "waiting for the first token",
}


def print_calibration(calibration: documents.Calibration, console: Console) -> None:
    """Print the `calibration` part of a document."""
    record, runs = calibration["record"], calibration["runs"]
    count = calibration["records"]
    sources = [f"{'a record' if count == 1 else f'{count} records'} of {record['device']}"] if count and record else []
    if runs:
        others = " of another model" if calibration["applied"] == "partly" else ""
        sources.append(f"{runs} run{'s' if runs > 1 else ''}{others}")
    print_factors(f"calibrated with {' and '.join(sources)}" if sources else "not calibrated", calibration, console)


def print_factors(title: str, fitted: documents.Explained, console: Console) -> None:
    """Print the factors that changed, with their ranges, and the mean error of each metric with and without them."""
    changed = [row for row in fitted["factors"] if row["changed"]]
    nothing = ": they determine no factor" if fitted["runs"] and not changed else ""
    console.print(Text.assemble((title, "bold"), nothing))
    table = Table(("", ">", "", ""), ("name", "factor", "80% range", "constant"), ("80% range",))
    for row in changed:
        spread = f"{row['low_factor']:.2f} to {row['high_factor']:.2f}"
        table.add_row(f"  {row['name']}", f"x{row['factor']:.2f}", spread, _CONSTANTS[row["name"]])
    if changed:
        console.print(table)
    for error in fitted["errors"]:
        words = f"  {_METRICS.get(error['metric'], error['metric'])}: mean error"
        words += f" {percent(error['uncalibrated_mean_error'])}, {percent(error['mean_error'])} with these factors"
        if error["left_out_mean_error"] is not None:
            words += f"; {percent(error['left_out_mean_error'])} on held-out runs"
        console.print(words)
