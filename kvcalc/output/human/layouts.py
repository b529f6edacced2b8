"""How a plan's question, its layouts and its limits are written, on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import (
    OVERLOADED,
    byte_rate,
    count,
    duration,
    duration_or_overloaded,
    judged_with,
    percent,
    rate,
    requests_per_second,
    sessions_text,
    size,
    split,
    text,
    users_text,
)
from kvcalc.output.human.tables import Column, Text
from kvcalc.units import format_hours

if TYPE_CHECKING:
    import kvcalc.documents as documents

_METRICS = ("ttft", "tpot", "e2e")


def limits_of(targets: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """The limited metrics in capitals, with their statistic (`mean`, `p99`) and the limit in seconds."""
    return [
        (metric.upper(), f"p{percentile}" if (percentile := targets[f"{metric}_percentile"]) else "mean", limit)
        for metric in _METRICS
        if (limit := targets[f"max_{metric}_seconds"]) is not None
    ]


def replica_split(row: Mapping[str, Any]) -> str:
    """How a replica is split, such as `tp 8 x dcp 4`. Experts are named if they are not split as usual."""
    experts, is_replicated = row["expert_parallel_size"], row["data_parallel_size"] > 1
    parts = [split(row) or "tp 1"]
    parts += [f"ep {experts}"] if (experts > 1) != is_replicated else []
    parts += [f"dcp {row['decode_context_parallel_size']}"] if row["decode_context_parallel_size"] > 1 else []
    return " x ".join(parts)


def simulated_columns(targets: Mapping[str, Any]) -> list[Column]:
    """A column of the plan's table for each simulated time that a target limits."""
    return [
        (f">{name} {statistic}", f"simulated_{name.lower()}_seconds", duration)
        for name, statistic, _ in limits_of(targets)
    ]


def finalist_columns(document: Mapping[str, Any]) -> list[Column]:
    """The columns of `finalist_rows`. Without a target there are the 99th percentiles."""
    limited = [(name, statistic) for name, statistic, _ in limits_of(document["targets"])]
    shown = limited or [(metric.upper(), "p99") for metric in _METRICS]
    columns: list[Column] = [("", "gpu", text)]
    if len(document["engines"]) > 1:
        columns.append(("engine", "engine", text))
    columns += [(">GPUs", "num_devices", count), ("layout", "layout", text)]
    columns += [(f">{name} {part}", f"{name.lower()}_{part}_seconds", duration_or_overloaded) for name, part in shown]
    return [*columns, *([("", "verdict", text)] if limited else [])]


def finalist_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table: each layout, and whether it meets the targets. None without targets."""
    rows: list[dict[str, Any]] = []
    if not limits_of(document["targets"]) and document["trace"] is None:
        return rows
    for row in document["finalists"]:
        alone = "one by one, " if row["num_devices"] is None else ""
        if row["disaggregated"] is not None:
            layout = f"{alone}{pools_text(row['disaggregated'])}"
        else:
            each = replica_split(row)
            layout = f"{row['replicas']} x {each}" if (row["replicas"] or 1) > 1 else f"{alone}{each}"
        if not row["keeps_up"]:
            # These times grow for as long as one simulates.
            row = {key: OVERLOADED if key.startswith(("ttft_", "e2e_")) else value for key, value in row.items()}
        others = " with other seeds" if "with other seeds" in (row["reason"] or "") else ""
        rows.append({**row, "layout": layout, "verdict": "passes" if row["passes"] else f"misses{others}"})
    return rows


def print_finalists(document: Mapping[str, Any], console: Console) -> None:
    """Print the simulated layouts with their number of requests, and whether each meets the targets.

    For limits on means alone, the table of layouts says enough.
    """
    rows = finalist_rows(document)
    if not rows or (document["trace"] is None and all(at == "mean" for _, at, _ in limits_of(document["targets"]))):
        return
    # Requests alone may be fewer, and each kind of device may have its own number.
    numbers = sorted({row["requests"] for row in rows if row["num_devices"] is not None} or {rows[0]["requests"]})
    requests = count(numbers[0]) if len(numbers) == 1 else f"{count(numbers[0])} to {count(numbers[-1])}"
    seeds = max(row["seeds"] for row in rows)
    again = f", the winner with up to {seeds} seeds" if seeds > 1 else ""
    console.print(f"\nSimulated with {requests} requests{again}:\n")
    columns = finalist_columns(document)
    print_table(rows, columns, console)


def question_of(document: Mapping[str, Any]) -> str:
    """The lengths of the requests, the load and the engine as text."""
    lengths, targets = document["lengths"], document["targets"]
    parts = [f"{count(lengths['input_tokens'])} tokens in, {count(lengths['output_tokens'])} out"]
    if lengths["file"]:
        parts[0] += f" (means of {count(lengths['num_requests'])}; the longest has {count(lengths['longest_tokens'])})"
    if document.get("prefix_tokens"):
        parts[0] += f", the first {count(document['prefix_tokens'])} in common"
    if document["trace"]:
        mean, peak = (rate(document["trace"][f"{name}requests_per_second"]) for name in ("", "peak_"))
        parts.append(f"{mean} requests per second" + (f", {peak} in the busiest minute" if peak != mean else ""))
    elif targets["deadline_seconds"]:
        needed = requests_per_second(targets["requests_per_second"])
        parts.append(f"{count(targets['num_requests'])} requests within {format_hours(targets['deadline_seconds'])}")
        parts[-1] += f" = {needed}"
    elif targets["users"]:
        arriving = document["best"] and document["best"]["requests_per_second"]
        parts.append(users_text(targets["users"], targets["think_seconds"], arriving, document["headroom"]))
    elif targets["concurrency"]:
        parts.append(f"{count(targets['concurrency'])} concurrent request{'s' if targets['concurrency'] > 1 else ''}")
    else:
        parts.append(requests_per_second(targets["requests_per_second"]))
    if targets["session_turns"]:
        parts.insert(1, sessions_text(targets["session_turns"], targets["session_growth_tokens"]))
    if document["headroom"] and not targets["users"]:
        parts[-1] += f" and {document['headroom']:.0%} more"
    if len(document["engines"]) == 1:
        parts.append(document["engines"][0])
    return ", ".join(parts)


def targets_text(targets: Mapping[str, Any]) -> str:
    """The limits as text, such as `TTFT p99 <= 1 s and TPOT <= 40 ms`. Empty without any."""
    return " and ".join(
        f"{name} <= {duration(limit)}" if statistic == "mean" else f"{name} {statistic} <= {duration(limit)}"
        for name, statistic, limit in limits_of(targets)
    )


def layout_of(row: Mapping[str, Any]) -> str:
    """The replicas and how each is split, such as `2 x tp 4 x pp 2`, or both pools."""
    if not row["fits"]:
        return "-"
    if row.get("disaggregated") is not None:
        return pools_text(row["disaggregated"])
    each = replica_split(row)
    return f"{row['replicas']} x {each}" if row["replicas"] > 1 else each


def pools_text(pools: documents.SplitPools) -> str:
    """Both pools, such as `2 x tp 4 P + tp 8 D`."""
    return f"{_instances(pools['prefill'])} P + {_instances(pools['decode'])} D"


def print_pools(row: Any, console: Console) -> None:
    """Print the parts of the time to the first token, the transfer, and how busy the pools are."""
    pools = row["disaggregated"]
    parts, transfer = pools["ttft_parts"], pools["transfer"]
    text = " + ".join(f"{key.removesuffix('_seconds').replace('_', ' ')} {duration(parts[key])}" for key in parts)
    console.print()
    console.print(Text.assemble(("TTFT", "bold"), f"  {duration(row['ttft_seconds'])} = {text}"))
    link = transfer["link"] or byte_rate(transfer["bandwidth_bytes_per_second"])
    line = f"{size(transfer['bytes_per_device'])} of {size(transfer['request_bytes'])} on the busiest device ({link})"
    console.print(Text.assemble(("KV transfer", "bold"), f"  {line}"))
    for role in ("prefill", "decode"):
        pool = pools[role]
        busy = f"{percent(pool['utilization'])} of {requests_per_second(pool['max_requests_per_second'])}"
        line = f"{_instances(pool)}: {busy}, {count(pool['requests_held'])} requests in each cache"
        console.print(Text.assemble((role, "bold"), f"  {line}"))


def _instances(pool: documents.SplitPool) -> str:
    """The instances of a pool. Of requests one by one, they have no number."""
    each = split(pool) or "tp 1"
    return f"{pool['instances']} x {each}" if (pool["instances"] or 1) > 1 else each


def judged_text(document: Mapping[str, Any]) -> str:
    """With which confidence the targets are judged, and whether by a simulation."""
    confidence = judged_with(document["targets"]["confidence"])
    return f"simulated with steps {confidence}" if is_simulated(document) else confidence


def is_simulated(document: Mapping[str, Any]) -> bool:
    """Whether the simulation chose the layouts: for percentiles, and for every target with a trace."""
    limits = limits_of(document["targets"])
    return any(document["trace"] or statistic != "mean" for _, statistic, _ in limits)


def name_of_row(document: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The device of a row, and its engine and type of weights if the plan has several."""
    parts = [row["engine"]] if len(document["engines"]) > 1 else []
    parts += [row["weights_dtype"]] if has_types(document) and row["weights_dtype"] else []
    return f"{row['gpu']} with {' and '.join(parts)}" if parts else row["gpu"]


def has_types(document: Mapping[str, Any]) -> bool:
    """Whether several types of weights were asked for."""
    return "," in (document["dtype"] or "")
