"""`kvcalc measure` for a person: predicted beside held bytes, step times, and how near the memory roof."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human import measure_curve
from kvcalc.output.human.console import count, plain_table
from kvcalc.output.human.measure_format import percent, rate, seconds
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
    kept = _kept(workload)
    if kept:
        console.print(f"cache: {kept}")
    console.print()
    if document["curve"]:
        measure_curve.render(document, console)
    else:
        _bytes(document, console)
        console.print()
        _times(document, console)
        _notes(document, console)
    if document["capacity"]:
        _capacity(document["capacity"], console)
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
        step, share = run["decode_step_seconds"], run["fraction_of_roof"]
        core = run["attention_core_seconds"] or {"p50": None}
        table.add_row(
            run["attention"].upper(),
            seconds(step["p50"]),
            seconds(step["p90"]),
            percent(share["step"]),
            seconds(core["p50"]),
            rate(run["kv_read_bytes_per_second"]),
            percent(share["attention_core"]),
            run["backend"],
        )
    console.print(table)


def _kept(workload: dict[str, Any]) -> str:
    """How the cache is kept, where that is not as usual."""
    found = []
    if workload["cache"] != "preallocated":
        found.append({"grow": "grown by concatenation", "none": "none, the prefix is run again"}[workload["cache"]])
    if workload["block_size"]:
        found.append(f"blocks of {workload['block_size']} tokens")
    if workload["kv_dtype"] != workload["dtype"]:
        found.append(f"{workload['kv_dtype']} with a scale per row")
    if workload["mla"] != "absorbed":
        found.append("K and V rebuilt from the latent at every step")
    return ", ".join(found)


def _notes(document: dict[str, Any], console: Console) -> None:
    """Prefill, the other backends' times, and what all layers would take."""
    console.print()
    for run in document["runs"]:
        kind, filled, scaled = run["attention"].upper(), run["prefill"], run["scaled"]
        if filled:
            console.print(
                f"prefill of {kind}: {filled['tokens_per_second']:,.0f} tokens/s, "
                f"{percent(run['fraction_of_matmul_roof']['prefill'])} of the matmul rate"
            )
        timed = [
            f"{row['name']} {seconds(row['seconds'])}"
            for row in run["backends"]
            if row["seconds"] is not None and row["layer"] == run["backends"][0]["layer"]
        ]
        if timed:
            console.print(f"core of one layer, {kind}: {', '.join(timed)}", style="dim", soft_wrap=True)
        if scaled:
            console.print(
                f"scaled to all {scaled['num_layers']} layers, {kind}: {count(scaled['predicted_bytes'])} bytes, "
                f"step {seconds(scaled['decode_step_seconds'])}"
            )


def _capacity(found: dict[str, Any], console: Console) -> None:
    what = "tokens" if found["axis"] == "context" else "sequences"
    console.print(
        f"within {format_size(found['limit_bytes'], capacity=True)} {count(found['measured'])} {what} fit, "
        f"{found['ratio']:.1%} of the {count(found['predicted'])} predicted"
    )
