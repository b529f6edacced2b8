"""`kvcalc compare` for a person: one row a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvcalc.output.human.console import count, duration, plain_table, rate, size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the models side by side, and why one is refused."""
    rows, workload, engine = document["models"], document["workload"], document["engine"]
    hardware = document["hardware"]
    devices = engine["tensor_parallel_size"]
    parts = [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]
    if devices > 1:
        parts.append(f"tp {devices}")
    if hardware is not None:
        parts.append(f"{hardware['num_devices']} x {hardware['name']}")
    if engine["name"] != "logical":
        parts.append(" ".join(str(v) for v in (engine["name"], engine["version"]) if v))
    console.print(", ".join(parts))
    console.print()
    # Eighty columns: on several devices one device's share stands for the total.
    held = ("per device", "bytes_per_device") if devices > 1 else ("total", "total_bytes")
    columns: list[tuple[str, str, Callable[[Any], str]]] = [(*held, size)]
    if hardware is None:
        columns += [("per token", "bytes_per_token", size), ("fixed", "fixed_bytes_per_sequence", size)]
    columns.append(("weights", "weights_bytes", size))
    if hardware is not None:
        columns += [("batch at most", "max_batch_size", count), ("step", "decode_step_seconds", duration)]
        columns.append(("tok/s", "decode_tokens_per_second", rate))
    has_fit = any(row["fits"] is not None for row in rows)
    table = plain_table(("", "left"), ("", "left"), *((heading, "right") for heading, _, _ in columns))
    if has_fit:
        table.add_column("fits")
    for row in rows:
        cells = [row["name"], _kind(row["attention"]), *(print_(row[key]) for _, key, print_ in columns)]
        if has_fit:
            cells.append({True: "yes", False: "no", None: "-"}[row["fits"]])
        table.add_row(*cells, style="dim" if row["reason"] else "")
    console.print(table)


def _kind(attention: str | None) -> str:
    if attention is None:
        return "-"
    return attention if attention in ("hybrid", "none") else attention.upper()
