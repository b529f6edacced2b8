"""Human output of `kvcalc estimate --engine all`: one row per engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count, describe_workload, size, split, text, yes_or_no
from kvcalc.output.human.styled import Text
from kvcalc.output.human.tables import Column, table_of

if TYPE_CHECKING:
    import kvcalc.documents as documents


def render(document: documents.Engines, console: Console) -> None:
    """Print the engines side by side, and the reason if an engine refuses."""
    rows, workload, devices = document["engines"], document["workload"], split(document)
    asked = ", ".join(filter(None, [*describe_workload(workload), devices]))
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {asked}"))
    console.print()
    columns: list[Column] = [("", "engine", text), ("KV type", "dtype", text)]
    # To fit in 80 columns, leave out bytes per sequence for one sequence and if the model is split over devices.
    if workload["batch_size"] > 1 and not devices:
        columns.append((">per sequence", "bytes_per_sequence", size))
    columns.append((">per token", "bytes_per_token", size))
    columns.append((">per device", "bytes_per_device", size) if devices else (">total", "total_bytes", size))
    if any(row["kv_cache_tokens"] is not None for row in rows):
        columns += [(">blocks", "num_gpu_blocks", count), (">tokens", "kv_cache_tokens", count)]
    if any(row["fits"] is not None for row in rows):
        columns.append(("fits", "fits", yes_or_no))
    console.print(table_of(rows, columns))
    for row in rows:
        note = row["reason"] or row["kv_dtype_reason"]
        if note:
            console.print(f"{row['engine']}: {note}", style="dim")
