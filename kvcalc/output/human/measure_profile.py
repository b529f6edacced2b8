"""Human output of `kvcalc measure --profile`: attention of one layer at every point, measured and predicted."""

from __future__ import annotations

from typing import Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import byte_rate, count, duration, percent
from kvcalc.output.human.styled import Text
from kvcalc.output.human.tables import plain_table
from kvcalc.units import format_size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the profile document."""
    device, roof, launch = document["device"], document["roof"], document["launch"]
    console.print(Text.assemble(("profile", "bold"), f" of {device['kind']} ({device['name']})"))
    rate = f"{roof['matmul_flop_per_second'] / 1e12:,.3g} TFLOP/s in {roof['matmul_dtype']}"
    replayed = launch["replayed_seconds"]
    graph = "" if replayed is None else f", {duration(replayed)} in a graph"
    console.print(f"reads {byte_rate(roof['read_bytes_per_second'])}, multiplies {rate}", style="dim")
    console.print(f"a launch takes {duration(launch['launched_seconds'])}{graph}", style="dim")
    for row in document["all_reduces"]:
        taken = duration(row["seconds"])
        console.print(
            f"an all-reduce of {format_size(row['bytes'])} on {row['ranks']} ranks takes {taken}", style="dim"
        )
    console.print()
    has_predictions = any(row["predicted_layer_seconds"] for row in document["points"])
    predicted = (">predicted", ">error") if has_predictions else ()
    table = plain_table(
        "model", "", "cache", ">tokens", ">batch", ">one layer", *predicted, ">KV read", ">of roof", "kernel"
    )
    for row in document["points"]:
        measured, expected, rate = row["layer_seconds"], row["predicted_layer_seconds"], row["kv_read_bytes_per_second"]
        beside = (_time(expected), f"{expected / measured - 1:+.0%}" if expected and measured else "-")
        table.add_row(
            row["model"],
            row["attention"].upper(),
            row["kv_dtype"],
            count(row["context_tokens"]),
            count(row["batch_size"]),
            _time(measured),
            *(beside if has_predictions else ()),
            byte_rate(rate) if rate else "-",
            f"{percent(row['fraction_of_binding_roof'])} {row['binding_roof']}" if row["binding_roof"] else "-",
            row["backend"],
        )
    console.print(table)
    for row in document["skipped"]:
        load = f"{count(row['context_tokens'])} tokens, batch {count(row['batch_size'])}"
        console.print(f"{row['model']}, {load}, was not measured: {row['reason']}", style="dim")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
