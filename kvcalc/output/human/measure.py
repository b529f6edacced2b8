"""`kvcalc measure` for a person: predicted beside held bytes, step times, and how near the memory roof."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table
from kvcalc.units import format_size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the measure document."""
    model, workload, device = document["model"], document["workload"], document["device"]
    console.print(
        Text.assemble(
            (model["name"], "bold"),
            f"  {count(model['num_layers'])} attention layers on {device['kind']} ({device['name']})",
        )
    )
    console.print(
        f"{count(workload['context_tokens'])} tokens, batch {count(workload['batch_size'])}, {workload['dtype']}, "
        f"{workload['steps']} steps, reads at most {rate(document['roof']['read_bytes_per_second'])}"
    )
    if workload["tensor_parallel_size"] > 1:
        console.print(
            f"heads over {workload['tensor_parallel_size']} ranks: the bytes are each rank's, the times the slowest's"
        )
    console.print()
    _bytes(document, console)
    console.print()
    _times(document, console)
    for skip in document["skipped"]:
        console.print(f"{skip['attention'].upper()} skipped: {skip['reason']}", style="dim")


def _bytes(document: dict[str, Any], console: Console) -> None:
    table = plain_table(
        ("", "left"),
        ("predicted bytes", "right"),
        ("held bytes", "right"),
        ("", "left"),
        ("allocator", "right"),
        ("self-check", "left"),
    )
    for run in document["runs"]:
        check = run["verified"]
        passed = Text("ok", "green") if check["ok"] else Text(f"off by {check['max_abs_error']}", "bold red")
        for row in run["ranks"] or [run]:
            rank = row.get("rank", 0)
            equal = row["held_bytes"] == row["predicted_bytes"]
            table.add_row(
                f"{'' if rank else run['attention'].upper():<3} rank {rank}"
                if run["ranks"]
                else run["attention"].upper(),
                count(row["predicted_bytes"]),
                count(row["held_bytes"]),
                Text("equal", "green") if equal else Text("DIFFER", "bold red"),
                count(row["allocator_bytes"]),
                Text() if rank else passed,
            )
    console.print(table)


def _times(document: dict[str, Any], console: Console) -> None:
    """Each share of the roof stands behind the time it belongs to: a whole step's, then attention's alone."""
    table = plain_table(
        ("", "left"),
        ("step p50", "right"),
        ("p90", "right"),
        ("of roof", "right"),
        ("core p50", "right"),
        ("KV read", "right"),
        ("of roof", "right"),
        ("backend", "left"),
    )
    for run in document["runs"]:
        step, core, share = run["decode_step_seconds"], run["attention_core_seconds"], run["fraction_of_roof"]
        table.add_row(
            run["attention"].upper(),
            seconds(step["p50"]),
            seconds(step["p90"]),
            f"{share['step']:.0%}",
            seconds(core["p50"]),
            rate(run["kv_read_bytes_per_second"]),
            f"{share['attention_core']:.0%}",
            run["backend"],
        )
    console.print(table)


def seconds(value: float) -> str:
    """A duration in the unit that gives it three digits or so."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1:
            return f"{value * scale:,.3g} {unit}" if value * scale < 1000 else f"{value * scale:,.0f} {unit}"
    return f"{value * 1e6:.3f} us"


def rate(bytes_per_second: float) -> str:
    """Bytes per second in powers of 1024."""
    return f"{format_size(int(bytes_per_second), capacity=True)}/s"
