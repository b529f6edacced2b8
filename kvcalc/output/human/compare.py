"""Human output of `kvcalc compare`: one row per model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console, print_table
from kvcalc.output.human.figures import (
    attention,
    count,
    describe_workload,
    duration,
    name_engine,
    rate,
    size,
    span,
    split,
    text,
    yes_or_no,
)
from kvcalc.output.human.tables import Column, Text, table_of

if TYPE_CHECKING:
    import kvcalc.documents as documents


def render(document: documents.Compare, console: Console) -> None:
    """Print what all rows have in common, then the rows."""
    rows: list[Any] = [{**row, "devices": _devices(row), "range": _range(row)} for row in document["models"]]
    console.print(", ".join(_common(document, rows)))
    console.print()
    on_devices = any(row["gpu"] is not None for row in rows)
    is_split = any((row["tensor_parallel_size"] or 1) * (row["data_parallel_size"] or 1) > 1 for row in rows)
    columns: list[Column] = [("", "model", text)]
    if len({row["engine"] for row in rows}) > 1:
        columns.append(("engine", "engine", text))
    if len({row["devices"] for row in rows}) > 1:
        columns.append(("devices", "devices", text))
    # If the model is split, print one device's share instead of the total.
    held = (">per device", "bytes_per_device") if is_split else (">total", "total_bytes")
    columns += [("", "attention", attention), (*held, size)]
    if not on_devices:
        columns += [(">per token", "bytes_per_token", size), (">fixed", "fixed_bytes_per_sequence", size)]
    columns.append((">weights", "weights_bytes", size))
    if any(row["max_batch_size"] is not None for row in rows):
        columns.append((">max batch", "max_batch_size", count))
    if on_devices:
        columns += [(">step", "decode_step_seconds", duration), (">80% range", "range", text)]
        columns.append((">tok/s", "decode_tokens_per_second", rate))
    if any(row["fits"] is not None for row in rows):
        columns.append(("fits", "fits", yes_or_no))
    has_kinds = len({(row["model"], row["engine"], row["devices"]) for row in rows}) < len(rows)
    optional = ["range", *([] if has_kinds else ["attention"]), "weights_bytes", "decode_tokens_per_second"]
    print_table(rows, columns, console, optional)


def _common(document: documents.Compare, rows: list[Any]) -> list[str]:
    """The workload, and the devices and the engine if all rows have the same."""
    parts = describe_workload(document["workload"])
    sizes = {row["tensor_parallel_size"] for row in rows} - {None}
    if len(sizes) == 1 and sizes != {1}:
        parts.append(f"tp {sizes.pop()}")
    devices = {row["devices"] for row in rows}
    parts += [name for name in devices if name is not None and len(devices) == 1]
    engines = document["engines"]
    if len(engines) == 1 and engines[0]["name"] != "logical":
        parts.append(name_engine(engines[0]))
    return parts


def _devices(row: documents.CompareRow) -> str | None:
    return None if row["gpu"] is None else f"{row['num_devices']} x {row['gpu']}"


def _range(row: documents.CompareRow) -> str:
    return span(row["decode_step_seconds"], row["decode_step_low_seconds"], row["decode_step_high_seconds"])


# Human output of `kvcalc estimate --engine all`: one row per engine.


def render_engines(document: documents.Engines, console: Console) -> None:
    """Print the engines side by side, and the reason if an engine refuses."""
    rows, workload, devices = document["engines"], document["workload"], split(document)
    workload_text = ", ".join(filter(None, [*describe_workload(workload), devices]))
    console.print(Text.assemble((document["model"]["name"], "bold"), f"  {workload_text}"))
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
