"""The simulated layouts of `kvcalc plan`, and the names of the statistics that its targets limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvcalc.output.human.figures import count, duration, split, text
from kvcalc.output.human.tables import Column, print_table

_METRICS = ("ttft", "tpot", "e2e")


def limits_of(targets: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """The limited metrics in capitals, with their statistic (`mean`, `p99`) and the limit in seconds."""
    return [
        (metric.upper(), f"p{percentile}" if (percentile := targets[f"{metric}_percentile"]) else "mean", limit)
        for metric in _METRICS
        if (limit := targets[f"max_{metric}_seconds"]) is not None
    ]


def replica_split(row: dict[str, Any]) -> str:
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
    columns += [(f">{name} {part}", f"{name.lower()}_{part}_seconds", duration) for name, part in shown]
    return [*columns, *([("", "verdict", text)] if limited else [])]


def finalist_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table: each layout, and whether it meets the targets."""
    rows = []
    for row in document["finalists"]:
        alone = "one by one, " if row["num_devices"] is None else ""
        if row["disaggregated"] is not None:
            from kvcalc.output.human.split_pools import pools_text

            layout = f"{alone}{pools_text(row['disaggregated'])}"
        else:
            each = replica_split(row)
            layout = f"{row['replicas']} x {each}" if (row["replicas"] or 1) > 1 else f"{alone}{each}"
        rows.append({**row, "layout": layout, "verdict": "passes" if row["passes"] else "misses"})
    return rows


def print_finalists(document: dict[str, Any], console: Console) -> None:
    """Print the simulated layouts with their number of requests, and whether each meets the targets."""
    rows = finalist_rows(document)
    if not rows:
        return
    # Requests alone may be fewer, and each kind of device may have its own number.
    numbers = sorted({row["requests"] for row in rows if row["num_devices"] is not None} or {rows[0]["requests"]})
    requests = count(numbers[0]) if len(numbers) == 1 else f"{count(numbers[0])} to {count(numbers[-1])}"
    seeds = max(row["seeds"] for row in rows)
    again = f", what won with {seeds} seeds" if seeds > 1 else ""
    console.print(f"\nSimulated with {requests} requests{again}:\n")
    columns = finalist_columns(document)
    print_table(rows, columns, console)
