"""`kvcalc estimate --engine all` for a person: one row an engine."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table, size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the engines side by side, and why one refuses."""
    workload, devices = document["workload"], document["tensor_parallel_size"]
    parts = [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]
    if devices > 1:
        parts.append(f"tp {devices}")
    console.print(Text.assemble((document["model"]["name"], "bold"), "  ", ", ".join(parts)))
    console.print()
    rows = document["engines"]
    has_pool = any(row["kv_cache_tokens"] is not None for row in rows)
    columns = [("", "left"), ("KV type", "left"), ("per sequence", "right"), ("per token", "right"), ("total", "right")]
    columns += [("per device", "right")] if devices > 1 else []
    columns += [("blocks", "right"), ("tokens", "right")] if has_pool else []
    table = plain_table(*columns)
    for row in rows:
        cells = [row["name"], row["dtype"] or "-", size(row["bytes_per_sequence"]), size(row["bytes_per_token"])]
        cells.append(size(row["total_bytes"]))
        cells += [size(row["bytes_per_device"])] if devices > 1 else []
        cells += [count(row["num_gpu_blocks"]), count(row["kv_cache_tokens"])] if has_pool else []
        table.add_row(*cells, style="dim" if row["reason"] else "")
    console.print(table)
    for row in rows:
        note = row["reason"] or row["kv_dtype_reason"]
        if note:
            console.print(f"{row['name']}: {note}", style="dim")
