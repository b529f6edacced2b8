"""Human output of `kvcalc estimate`.

Without a device it shows the formula with its numbers, the totals, where an engine's bytes go, and the four kinds of
attention. With a device it shows the verdict first, then the totals and the speed, on one screen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import (
    attention,
    count,
    describe_images,
    describe_workload,
    name_engine,
    size,
    split,
)
from kvcalc.output.human.fit import describe_devices, print_changes, print_limits, print_memory
from kvcalc.output.human.server import headline, print_server
from kvcalc.output.human.speed import print_drafting, print_speed
from kvcalc.output.human.tables import Text, plain_table
from kvcalc.units import format_parameters, format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents


def render(
    document: documents.Estimate, console: Console, variants: bool = False,
    fit_alone: documents.FitDocument | None = None,
) -> None:  # fmt: skip
    """Print the estimate document. With a device, the four kinds of attention are shown only if `variants` is true.

    `fit_alone` is the fit document of the same question, which says how it would fit.
    """
    _heading(document, console)
    fit = document["fit"]
    if document["hardware"] is None:
        _formula(document, console)
        _totals(document, console)
        _lines(document["engine"], console)
        if fit is not None:
            _fit(document, fit, console)
    else:
        if fit is not None:
            console.print(headline(document))
            print_server(document, console)
            console.print()
            print_memory(document, fit, console)
            if fit_alone is not None:
                print_changes(fit_alone, console)
            console.print()
        _totals(document, console)
        if document["throughput"] is not None:
            print_speed(document["throughput"], document["workload"], console)
    if document["speculative"] is not None:
        print_drafting(document["speculative"], document["throughput"], console)
    if "reuse" in document:
        from kvcalc.output.human.reuse import print_reuse

        print_reuse(document["reuse"], fit, console)
    _weights(document["weights"], console)
    if "sources" in document:
        from kvcalc.output.human.explained import print_explained

        print_explained(document, console)
    if variants or document["hardware"] is None:
        _variants(document, console)


def _heading(document: documents.Estimate, console: Console) -> None:
    model, engine = document["model"], document["engine"]
    console.print(Text.assemble((model["name"], "bold"), f"  {_describe(model)}"))
    hardware = document["hardware"]
    workload = document["workload"]
    parts = [*describe_workload(workload), *describe_images(workload), document["kv_cache"]["dtype"]]
    if hardware is None:
        parts.append(split(engine))
    if engine["name"] != "logical":
        parts.append(name_engine(engine))
    console.print(", ".join(filter(None, parts)))
    if hardware is not None:
        console.print(f"on {describe_devices(hardware, engine)}")
        if hardware["note"]:
            console.print(f"{hardware['name']}: {hardware['note']}", style="dim")
    if engine["kv_dtype_reason"]:
        console.print(f"{document['kv_cache']['dtype']}: {engine['kv_dtype_reason']}", style="dim")
    for row in engine["device_defaults"] or ():
        on_devices = ", ".join(f"{_value(one['value'])} on {one['devices']}" for one in row["on_devices"])
        console.print(f"--{row['option']} {_value(row['value'])}: {on_devices}", style="dim")
    console.print()


def _value(value: int | str) -> str:
    return value if isinstance(value, str) else count(value)


def _describe(model: documents.Model) -> str:
    layers = f"{count(model['num_layers'])} layers"
    if model["attention"] == "none":
        return f"no attention, {layers} of {count(model['hidden_size'])}"
    said = f"{attention(model['attention'])}, {layers}, {count(model['num_attention_heads'])} heads"
    if model["kv_lora_rank"]:
        return f"{said}, latent {model['kv_lora_rank']} + {model['qk_rope_head_dim']}"
    k, v = model["head_dim"], model["v_head_dim"]
    kv_heads = f"{count(model['num_kv_heads'])} KV head" + ("s" if (model["num_kv_heads"] or 0) > 1 else "")
    return f"{said}, {kv_heads} of {k}" + ("" if k == v else f" (K) and {v} (V)")


def _formula(document: documents.Estimate, console: Console) -> None:
    """Print the formula of each kind of layer. It gives the stored bytes; the engine's bytes are in the totals."""
    cache = document["kv_cache"]
    for row in cache["formulas"]:
        label = "KV cache" if len(cache["formulas"]) == 1 else f"{count(row['num_layers'])} layers"
        kind = row["kind"].replace("_", " ") + (f", window {count(row['window'])}" if row["window"] else "")
        console.print(Text.assemble((label, "bold"), f"  {kind}"))
        console.print(f"  = {row['symbols']}")
        console.print(f"  = {row['numbers']}")
        console.print(f"  = {count(row['bytes'])} bytes stored")
    console.print()


def _totals(document: documents.Estimate, console: Console) -> None:
    cache, engine = document["kv_cache"], document["engine"]
    table = plain_table("", ">", ">")
    total = "total" if document["hardware"] is None else "KV cache"
    rows = [(total, cache["total_bytes"]), ("per sequence", cache["bytes_per_sequence"])]
    # With a device the verdict shows these.
    if split(engine) and document["hardware"] is None:
        rows.append(("per device", cache["bytes_per_device"]))
        rows.append(("all devices", cache["devices_total_bytes"]))
    # A sequence takes fixed + tokens x bytes per token. Print both even if one is 0.
    rows.append(("  fixed", cache["fixed_bytes_per_sequence"]))
    rows.append(("  per token", cache["bytes_per_token"]))
    for label, value in rows:
        table.add_row(label, size(value), count(value), style="bold" if label == total else "")
    console.print(table)
    console.print()


def _weights(weights: documents.Weights, console: Console) -> None:
    """Print one line with parameters, bytes and dtype. Print nothing if they are not known."""
    parts = []
    whole, active, table = (
        weights["parameters"], weights["active_parameters_per_token"], weights["input_embedding_parameters"],
    )  # fmt: skip
    if whole is not None and active is not None and table is not None:
        parts.append(f"{format_parameters(whole)} parameters")
        # A dense model reads all parameters but the embedding, so the active ones add no information.
        if active + table < whole:
            parts.append(f"{format_parameters(active)} active")
    if weights["bytes"] is not None:
        parts.append(f"{size(weights['bytes'])} {weights['dtype'] or ''}".rstrip())
    for tower in weights["towers"]:
        parts.append(f"{tower['name']} {'not counted' if tower['bytes'] is None else size(tower['bytes'])}")
    if parts:
        console.print(Text.assemble(("weights", "bold"), f"  {', '.join(parts)}"))
        console.print()


def _lines(engine: Any, console: Console) -> None:
    """Print where an engine's bytes go on one device, and the figures of its pool if it has one."""
    for key, title in (("request_lines", "one request, per device"), ("pool_lines", "whole batch, per device")):
        if key in engine:
            table = plain_table(title, ">", ">bytes")
            for line in engine[key]:
                table.add_row(line["name"], size(line["bytes"]), count(line["bytes"]))
            console.print(table)
            console.print()
    if engine.get("kv_cache_tokens") is not None:
        blocks = f"{count(engine['num_gpu_blocks'])} blocks of {count(engine['block_size'])}"
        held = f"{count(engine['kv_cache_tokens'])} tokens, {engine['max_concurrency']:.2f} requests"
        console.print(f"{blocks}: {held}")
        console.print()


def _fit(document: documents.Estimate, fit: documents.Fit, console: Console) -> None:
    """Print whether the cache fits in the given memory, and the limits."""
    verdict = ("fits", "bold green") if fit["fits"] else ("does not fit", "bold red")
    memory = format_size(fit["kv_cache_memory_bytes"], capacity=True)
    needed = "" if fit["fits"] else f": {size(fit['kv_cache_bytes'])} needed"
    console.print(Text.assemble(verdict, f" in {memory} per device{needed}"))
    print_limits(document, fit, console)
    console.print()


def _variants(document: documents.Estimate, console: Console) -> None:
    """Print the four kinds side by side. Below the table, print the reasons for missing kinds, each reason once."""
    reasons = [row["reason"] for row in document["variants"]]
    if None not in reasons:
        console.print(f"no variants: {reasons[0]}", style="dim")
        return
    table = plain_table("", ">KV heads", ">bytes/token", ">total", ">of MHA", ">params/layer",
                        optional=("params/layer", "bytes/token", "KV heads"))  # fmt: skip
    notes: dict[str, list[str]] = {}
    chosen = _chosen(document)
    for row in document["variants"]:
        name = row["attention"].upper() + (" *" if row["own"] else " <" if row is chosen else "")
        if row["reason"] is not None:
            notes.setdefault(row["reason"], []).append(name)
        style = "bold" if row is chosen else ("dim" if row["reason"] else "")
        latent = f"latent {row['kv_lora_rank']}+{row['qk_rope_head_dim']}" if row["kv_lora_rank"] else None
        token, parameters = count(row["bytes_per_token"]), count(row["attention_parameters_per_layer"])
        sizes = [token, size(row["total_bytes"]), ratio(row["ratio_to_mha"]), parameters]
        table.add_row(name, latent or count(row["num_kv_heads"]), *sizes, style=style)
    console.print(table)
    said = [f"{', '.join(names)}: {reason}" for reason, names in notes.items()]
    if any(row["own"] for row in document["variants"]):
        said.append("* the model's own")
    if chosen is not None and not chosen["own"]:
        said.append("< the what-if above")
    console.print("   ".join(said), style="dim")


def _chosen(document: documents.Estimate) -> documents.Variant | None:
    """The variant that the rest of the output describes."""
    model, *rows = [
        (variant["num_kv_heads"], variant["kv_lora_rank"], variant["qk_rope_head_dim"])
        for variant in (document["model"], *document["variants"])
    ]
    possible = (row for row, sizes in zip(document["variants"], rows) if row["reason"] is None and sizes == model)
    return next(possible, None)


def ratio(value: float | None) -> str:
    """A ratio to MHA: `1/8` if it is one over a whole number, otherwise a percentage."""
    if value is None:
        return "-"
    inverse = 1 / value
    if value < 1 and abs(inverse - round(inverse)) < 1e-9:
        return f"1/{round(inverse)}"
    return "1" if value == 1 else f"{value:.1%}"
