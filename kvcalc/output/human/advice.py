"""Human output of `kvcalc check --advise`: what binds, each change alone, and the improved command beside today's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import duration, requests_per_second
from kvcalc.output.human.tables import Text, plain_table
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents


def print_advice(document: documents.Check, advice: documents.Advice, console: Console) -> None:
    """Print the `advice` part of a check document."""
    improved = advice["improved"]
    console.print()
    console.print(Text.assemble(("advice", "bold"), f": {advice['binds']}"))
    table = plain_table(
        "change", ">requests/s", ">gain", ">TPOT", ">fit", ">free", "risk", optional=("risk", "fit", "free")
    )
    requests, fit = document["requests"], document["fit"]
    today: documents.AdvisedChange = {
        "change": "today", "starts": bool(document["starts"] or fit["fits"]), "capacity": document["capacity"],
        "gain": 0.0, "free_bytes": fit["free_bytes"], "max_requests": requests and requests["max_requests"], "risk": "",
    }  # fmt: skip
    gains = [row for row in advice["changes"] if row["gain"]]
    rows = [today, *sorted(gains, key=lambda row: row["gain"], reverse=True)]
    if improved is not None and len(improved["changes"]) > 1:
        rows.append({
            "change": "together", "starts": True, "capacity": improved["capacity"], "gain": improved["gain"],
            "free_bytes": improved["free_bytes"], "max_requests": None, "risk": "",
        })  # fmt: skip
    for row in rows:
        capacity, gain, fitting = row["capacity"], row["gain"], row["max_requests"]
        rate = f"{capacity['requests_per_second']:.3g}" if capacity else "-" if row["starts"] else "does not start"
        tpot = "-" if capacity is None else duration(capacity["tpot_mean_seconds"])
        table.add_row(
            row["change"], rate, f"{gain:+.0%}" if gain else "", tpot, "" if fitting is None else f"{fitting:,}",
            format_size(row["free_bytes"], capacity=True), row["risk"],
        )  # fmt: skip
    console.print(table)
    useless = [row["change"] for row in advice["changes"] if not row["gain"] and row["starts"]]
    refused = [row["change"] for row in advice["changes"] if not row["starts"]]
    for told, changes in (("gain nothing", useless), ("do not start", refused)):
        if changes:
            console.print(f"{told}: {'; '.join(changes)}", style="dim")
    if improved is None:
        return
    console.print()
    for change, risk in zip(improved["changes"], improved["risks"]):
        console.print(f"{change}: {risk}")
    console.print(Text(improved["command"], style="bold"))
    capacity, now = improved["capacity"], document["capacity"]
    if capacity is not None:
        before = "" if now is None else f", today {requests_per_second(now['requests_per_second'])}"
        console.print(f"sustains {requests_per_second(capacity['requests_per_second'])}{before}")
