"""Human output of `kvcalc prefix`: the knee first, then a row and a bar for each size of the cache, then the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import count, duration, percent, share, size, split, text
from kvcalc.output.human.tables import Column, Text

if TYPE_CHECKING:
    import kvcalc.documents as documents

_BAR = 24


def render(document: documents.Prefix, console: Console) -> None:
    """Print the document."""
    trace, knee, unlimited = document["trace"], document["knee"], document["unlimited"]
    has_bytes = knee["cache_bytes"] is not None
    console.print(Text.assemble((trace["file"], "bold"), f"  {_trace(trace)}"))
    model, engine, prefill = document["model"], document["engine"], document["prefill"]
    if model is not None and engine is not None:
        console.print(_setup(model["name"], engine, document["hardware"]))
    console.print()
    amount = size(knee["cache_bytes"]) if has_bytes else f"{count(knee['cache_tokens'])} tokens"
    text = f"finds {share(knee['hit_rate'])} of the prompt tokens"
    limit = f"without a limit, {share(unlimited['hit_rate'])}"
    console.print(Text.assemble(("knee: ", "bold"), f"a cache of {amount} {text}; {limit}"))
    if prefill is not None:
        saved = f"the knee saves {duration(knee['saved_ttft_seconds'])} of it ({percent(knee['saved_prefill_share'])})"
        console.print(f"a prompt takes {duration(prefill['mean_seconds'])} of prefill on average; {saved}")
    console.print()
    _curve(document, console, has_bytes)
    if document["tiers"] and engine is not None:
        console.print()
        _tiers(document["tiers"], engine["tensor_parallel_size"] * engine["pipeline_parallel_size"], console)


def _trace(trace: documents.PrefixTrace) -> str:
    parts = [f"{count(trace['num_requests'])} requests"]
    if trace["warm_up_requests"]:
        parts[0] += f", the first {count(trace['warm_up_requests'])} to warm up"
    if trace["duration_seconds"]:
        parts.append(f"{duration(trace['duration_seconds'])}")
    parts.append(f"{count(trace['prompt_tokens'] // trace['num_requests'])} tokens per prompt")
    kept = count(trace["distinct_blocks"])
    sampled = "about " if trace["sampling_rate"] < 1 else ""
    parts.append(f"{sampled}{kept} distinct blocks of {count(trace['block_tokens'])} tokens")
    return ", ".join(parts)


def _setup(model: str, engine: documents.PrefixEngine, hardware: documents.Hardware | None) -> str:
    parts = [model, engine["name"]]
    if hardware is not None:
        parts.append(f"{hardware['name']} x{hardware['num_devices']}")
    layout = split({**engine, "data_parallel_size": 1})
    parts += [layout] if layout else []
    per_block = f"{size(engine['bytes_per_trace_block'])} per block"
    return ", ".join([*parts, f"{engine['kv_dtype']} cache", per_block])


def _curve(document: documents.Prefix, console: Console, has_bytes: bool) -> None:
    rows: list[Any] = [*document["curve"]]
    highest = max((row["hit_rate"] for row in rows), default=0) or 1
    shown = [
        {
            **row,
            "bar": "#" * round(_BAR * row["hit_rate"] / highest),
            "range": f"{share(row['hit_rate_low'])} to {share(row['hit_rate_high'])}",
        }
        for row in rows
    ]
    columns: list[Column] = [(">cache", "cache_bytes", size)] if has_bytes else []
    if any(row["cache_bytes"] != row["cache_bytes_per_device"] for row in rows):
        columns.append((">per device", "cache_bytes_per_device", size))
    columns += [(">tokens", "cache_tokens", count), (">hits", "hit_rate", share)]
    if any(row["optimal_hit_rate"] is not None for row in rows):
        columns.append((">best possible", "optimal_hit_rate", share))
    if document["trace"]["sampling_rate"] < 1:
        columns.append((">99% range", "range", text))
    columns.append(("", "bar", str))
    if document["prefill"] is not None:
        columns += [(">prefill saved", "saved_prefill_share", percent), (">per prompt", "saved_ttft_seconds", duration)]
    for name in ("device", "cpu", "disk"):
        key = f"{name}_cost_per_gpu_second"
        if any(row[key] is not None for row in rows):
            columns.append((f">{name} cost", key, _money))
    print_table(shown, columns, console, ("cache_tokens", "cache_bytes_per_device", "bar", "saved_ttft_seconds"))
    if len(columns) > 1 and columns[-1][0].endswith(" cost"):
        price = document["prices"]["device_per_hour"]
        other = "" if price is None else f"; a GPU second costs {_money(price / 3600)}"
        console.print(f"cost: price of the memory over the trace / GPU seconds saved{other}", style="dim")


def _tiers(tiers: list[documents.PrefixTier], devices: int, console: Console) -> None:
    each = f"device, each of {devices}" if devices > 1 else "device"
    shown = [{**tier, "name": each if tier["name"] == "device" else tier["name"]} for tier in tiers]
    columns: list[Column] = [
        ("tier", "name", text), (">memory", "memory_bytes", size), (">hits", "hit_rate", share),
        (">prefill of the hits", "prefill_seconds", duration), (">loading them", "load_seconds", duration),
    ]  # fmt: skip
    print_table(shown, columns, console, ())


def _money(value: float | None) -> str:
    """A cost with two digits, or a dash for None."""
    return "-" if value is None else f"{value:.2g}"
