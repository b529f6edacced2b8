"""Human output of `kvcalc measure`: predicted and held bytes, speed, the share of the roof, and the times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import byte_rate, count, describe_workload, duration, flop_rate, percent
from kvcalc.output.human.tables import Text, plain_table
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

_BAR_COLUMNS = 20


def render(document: documents.Measure, console: Console) -> None:
    """Print the measure document, the verdict first."""
    model, workload, device = document["model"], document["workload"], document["device"]
    layers = "1 attention layer" if model["num_layers"] == 1 else f"{count(model['num_layers'])} attention layers"
    built = f"{layers} on {device['kind']} ({device['name']})"
    console.print(Text.assemble((model["name"], "bold"), f"  {built}"))
    words = [*describe_workload(workload), workload["dtype"], f"{workload['steps']} steps"]
    if lengths := workload.get("lengths"):
        spread = f"{count(len(lengths))} sequences of {count(min(lengths))} to {count(max(lengths))} tokens"
        words[:2] = [spread, f"{count(sum(lengths))} in all"]
    kept = _kept(workload)
    console.print(", ".join(words) + (f"; cache: {kept}" if kept else ""))
    if workload["tensor_parallel_size"] > 1:
        console.print(
            f"heads over {workload['tensor_parallel_size']} ranks: bytes are per rank, times are the slowest rank's"
        )
    console.print()
    if document["curve"]:
        _curve(document["curve"], console)
    else:
        _verdict(document, console)
        console.print()
        _times(document, console)
        _notes(document, console)
    roof = document["roof"]
    multiplies = f"multiplies {roof['matmul_dtype']} at {flop_rate(roof['matmul_flop_per_second'])}"
    console.print(f"roofs of this {device['kind']}: reads {byte_rate(roof['read_bytes_per_second'])}, {multiplies}")
    if document["capacity"]:
        _capacity(document["capacity"], console)
    for skip in document["skipped"]:
        console.print(f"{skip['attention'].upper()} skipped: {skip['reason']}", style="dim")


def _curve(rows: list[documents.CurveRow], console: Console) -> None:
    """Print a row for each point of a sweep. The longest step has a full bar, and all bars use the same scale."""
    longest = max(row["decode_step_seconds"] for row in rows)
    table = plain_table("", ">tokens", ">batch", ">step p50", "", ">tokens/s", ">KV read", "of roof", "kernel")
    last = None
    for row in rows:
        kind, step = row["attention"].upper(), row["decode_step_seconds"]
        point = [count(row["context_tokens"]), count(row["batch_size"]), duration(step)]
        bar = "#" * max(1, round(_BAR_COLUMNS * step / longest))
        read = byte_rate(row["kv_read_bytes_per_second"])
        share = percent(row["fraction_of_binding_roof"])
        share += f" {row['binding_roof']}" if row["binding_roof"] else ""
        speed = [f"{row['tokens_per_second']:,.0f}", read, share, row["backend"]]
        table.add_row("" if kind == last else kind, *point, bar, *speed)
        last = kind
    console.print(table)


def _verdict(document: documents.Measure, console: Console) -> None:
    """Print the result: whether the bytes are equal, the speed, and the kernel's share of its roof."""
    table = plain_table("", ">predicted bytes", ">held bytes", "", ">tokens/s", "core of roof", "kernel")
    for run in document["runs"]:
        kind = run["attention"].upper()
        rows: Any = run["ranks"] or [run]
        for row in rows:
            rank, predicted, held = row.get("rank", 0), row["predicted_bytes"], row["held_bytes"]
            name = f"{'' if rank else kind:<3} rank {rank}" if run["ranks"] else kind
            verdict = Text("equal", "green") if held == predicted else Text("DIFFER", "bold red")
            speed = (f"{run['tokens_per_second']:,.1f}", _share(run, "attention_core"), run["backend"])
            table.add_row(name, count(predicted), count(held), verdict, *(("",) * 3 if rank else speed))
    console.print(table)


def _times(document: documents.Measure, console: Console) -> None:
    """Print the times of the whole step and of attention alone, and the self-check."""
    table = plain_table("", ">step p50", ">p90", "of roof", ">core p50", ">KV read", "self-check")
    for run in document["runs"]:
        check, core = run["verified"], run["attention_core_seconds"] or {"p50": None}
        passed = Text("ok", "green") if check["ok"] else Text(f"off by {check['max_abs_error']}", "bold red")
        steps = [duration(run["decode_step_seconds"][quantile]) for quantile in ("p50", "p90")]
        read = [duration(core["p50"]), byte_rate(run["kv_read_bytes_per_second"])]
        table.add_row(run["attention"].upper(), *steps, _share(run, "step"), *read, passed)
    console.print(table)


def _share(run: documents.Run, what: str) -> str:
    """The share of the roof that limits a part of the run, by name."""
    roofs: Any = run["binding_roof"]
    binding = roofs[what]
    return "-" if binding is None else f"{percent(binding['fraction'])} {binding['roof']}"


def _kept(workload: documents.MeasureWorkload) -> str:
    """How the cache is kept, if it differs from the default."""
    texts = []
    if workload["cache"] != "preallocated":
        texts.append({"grow": "grown by concatenation", "none": "none, the prefix is recomputed"}[workload["cache"]])
    if workload["block_size"]:
        texts.append(f"blocks of {workload['block_size']} tokens")
    if workload["kv_dtype"] != workload["dtype"]:
        texts.append(f"{workload['kv_dtype']} with a scale per {workload.get('cache_scales') or 'row'}")
    if workload["mla"] != "absorbed":
        texts.append("K and V rebuilt from the latent at every step")
    return ", ".join(texts)


def _notes(document: documents.Measure, console: Console) -> None:
    """Print the prefill, the times of the other backends, and the figures scaled to all layers."""
    console.print()
    for run in document["runs"]:
        kind, filled, scaled = run["attention"].upper(), run["prefill"], run["scaled"]
        if filled:
            console.print(
                f"prefill of {kind}: {count(filled['tokens'])} tokens at {filled['tokens_per_second']:,.0f} tokens/s, "
                f"{percent(run['fraction_of_matmul_roof']['prefill'])} of the matmul roof"
            )
        timed = [
            f"{row['name']} {duration(row['seconds'])}"
            for row in run["backends"]
            if row["seconds"] is not None and row["layer"] == run["backends"][0]["layer"]
        ]
        if timed:
            console.print(f"core of one layer, {kind}: {', '.join(timed)}", style="dim")
        if scaled:
            console.print(
                f"scaled to all {scaled['num_layers']} layers, {kind}: {count(scaled['predicted_bytes'])} bytes, "
                f"step {duration(scaled['decode_step_seconds'])}"
            )


def _capacity(capacity: documents.Capacity, console: Console) -> None:
    what = "tokens" if capacity["axis"] == "context" else "sequences"
    console.print(
        f"{count(capacity['measured'])} {what} fit in {format_size(capacity['limit_bytes'], capacity=True)}, "
        f"{capacity['ratio']:.1%} of the {count(capacity['predicted'])} predicted"
    )


# Human output of `kvcalc measure --compare`: what differs, then every figure of both records with its ratio.


def render_compare(document: documents.MeasureCompare, console: Console) -> None:
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
    for figure in document["figures"]:
        kind = (figure["attention"] or "").upper()
        values = [_value(figure["figure"], value) for value in (figure["a"], figure["b"])]
        ratio = "-" if figure["ratio"] is None else f"{figure['ratio']:.3f}"
        table.add_row("" if kind == last else kind, figure["figure"], *values, ratio)
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


# Human output of `kvcalc measure --profile`: attention of one layer at every point, measured and predicted.


def render_profile(document: documents.MeasureProfile, console: Console) -> None:
    """Print the profile document."""
    device, roof, launch = document["device"], document["roof"], document["launch"]
    console.print(Text.assemble(("profile", "bold"), f" of {device['kind']} ({device['name']})"))
    multiplied = f"{roof['matmul_flop_per_second'] / 1e12:,.3g} TFLOP/s in {roof['matmul_dtype']}"
    replayed = launch["replayed_seconds"]
    graph = "" if replayed is None else f", {duration(replayed)} in a graph"
    console.print(f"reads {byte_rate(roof['read_bytes_per_second'])}, multiplies {multiplied}", style="dim")
    console.print(f"a launch takes {duration(launch['launched_seconds'])}{graph}", style="dim")
    for all_reduce in document["all_reduces"]:
        summed, taken = format_size(all_reduce["bytes"]), duration(all_reduce["seconds"])
        console.print(f"an all-reduce of {summed} on {all_reduce['ranks']} ranks takes {taken}", style="dim")
    console.print()
    has_predictions = any(row["predicted_layer_seconds"] for row in document["points"])
    predicted = (">predicted", ">error") if has_predictions else ()
    table = plain_table(
        "model", "", "cache", ">tokens", ">batch", ">one layer", *predicted, ">KV read", ">of roof", "kernel"
    )
    for row in document["points"]:
        measured, expected, rate = row["layer_seconds"], row["predicted_layer_seconds"], row["kv_read_bytes_per_second"]
        beside = (duration(expected), f"{expected / measured - 1:+.0%}" if expected and measured else "-")
        table.add_row(
            row["model"],
            row["attention"].upper(),
            row["kv_dtype"],
            count(row["context_tokens"]),
            count(row["batch_size"]),
            duration(measured),
            *(beside if has_predictions else ()),
            byte_rate(rate) if rate else "-",
            f"{percent(row['fraction_of_binding_roof'])} {row['binding_roof']}" if row["binding_roof"] else "-",
            row["backend"],
        )
    console.print(table)
    for left_out in document["skipped"]:
        load = f"{count(left_out['context_tokens'])} tokens, batch {count(left_out['batch_size'])}"
        console.print(f"{left_out['model']}, {load}, was not measured: {left_out['reason']}", style="dim")
