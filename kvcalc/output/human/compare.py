"""`kvcalc compare` for a person: one row a model."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcalc.output.human.console import count, plain_table, size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the models side by side, and why one is refused."""
    rows, workload, engine = document["models"], document["workload"], document["engine"]
    devices = engine["tensor_parallel_size"]
    parts = [f"{count(workload['context_tokens'])} tokens", f"batch {count(workload['batch_size'])}"]
    if devices > 1:
        parts.append(f"tp {devices}")
    if engine["name"] != "logical":
        parts.append(" ".join(str(v) for v in (engine["name"], engine["version"]) if v))
    console.print(", ".join(parts))
    console.print()
    # Eighty columns: on several devices one device's share stands for the total.
    held = ("per device", "bytes_per_device") if devices > 1 else ("total", "total_bytes")
    columns = [held, ("per token", "bytes_per_token"), ("fixed", "fixed_bytes_per_sequence")]
    columns.append(("weights", "weights_bytes"))
    has_fit = any(row["fits"] is not None for row in rows)
    table = plain_table(("", "left"), ("", "left"), *((heading, "right") for heading, _ in columns))
    if has_fit:
        table.add_column("fits")
    for row in rows:
        cells = [row["name"], _kind(row["attention"]), *(size(row[key]) for _, key in columns)]
        if has_fit:
            cells.append({True: "yes", False: "no", None: "-"}[row["fits"]])
        table.add_row(*cells, style="dim" if row["reason"] else "")
    console.print(table)


def _kind(attention: str | None) -> str:
    if attention is None:
        return "-"
    return attention if attention in ("hybrid", "none") else attention.upper()
