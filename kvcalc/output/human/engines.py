"""`kvcalc estimate --engine all` for a person: one row an engine."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table, size, split


def render(document: dict[str, Any], console: Console) -> None:
    """Print the engines side by side, and why one refuses."""
    workload, devices = document["workload"], split(document)
    parts = [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]
    if devices:
        parts.append(devices)
    console.print(Text.assemble((document["model"]["name"], "bold"), "  ", ", ".join(parts)))
    console.print()
    rows = document["engines"]
    has_pool = any(row["kv_cache_tokens"] is not None for row in rows)
    # Eighty columns: of one sequence on one device the total says it all, and on several devices one device's share.
    held = [("per token", "bytes_per_token"), ("total", "total_bytes")]
    if devices:
        held[1] = ("per device", "bytes_per_device")
    elif workload["batch_size"] > 1:
        held.insert(0, ("per sequence", "bytes_per_sequence"))
    pool = [("blocks", "num_gpu_blocks"), ("tokens", "kv_cache_tokens")] if has_pool else []
    table = plain_table(("", "left"), ("KV type", "left"), *((name, "right") for name, _ in (*held, *pool)))
    for row in rows:
        cells = [*(size(row[key]) for _, key in held), *(count(row[key]) for _, key in pool)]
        table.add_row(row["name"], row["dtype"] or "-", *cells, style="dim" if row["reason"] else "")
    console.print(table)
    for row in rows:
        note = row["reason"] or row["kv_dtype_reason"]
        if note:
            console.print(f"{row['name']}: {note}", style="dim")
