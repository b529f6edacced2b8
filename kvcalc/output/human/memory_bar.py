"""A device's memory as a bar of plain characters, with what each stands for: read alike in light and dark."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from kvcalc.output.human.console import plain_table
from kvcalc.units import format_size

_WIDTH = 64
MARKS = {"weights": "#", "kv_cache": "=", "activation": "+", "reserve": "x", "free": "."}
# In the order they stand in the bar.
_KINDS = tuple(MARKS)


def print_bar(fit: dict[str, Any], console: Console) -> None:
    """The bar, then a line for each part. Where it does not fit, the bar runs past the device's end, a `|`."""
    lines = fit["lines"]
    parts = {kind: sum(line["bytes"] for line in lines if line["kind"] == kind) for kind in _KINDS}
    device = fit["device_bytes"]
    console.print(bar(parts, device))
    table = plain_table("", ">", ">")
    for line in sorted(lines, key=lambda line: _KINDS.index(line["kind"])):
        is_free, is_missing = line["kind"] == "free", line["bytes"] < 0
        name = "  missing" if is_missing else f"{MARKS[line['kind']]} {line['name']}"
        size = format_size(abs(line["bytes"]), capacity=is_free and not is_missing)
        share = f"{100 * abs(line['bytes']) / device:.1f} %"
        table.add_row(name, size, share, style="bold" if is_missing else "")
    console.print(table)


def bar(parts: dict[str, int], device_bytes: int) -> str:
    """`[####===++xx....]`, each part at least one mark where it is anything; with a `|` where the device ends if more
    is asked of it than it has."""
    asked = sum(size for kind, size in parts.items() if kind != "free")
    whole = max(asked, device_bytes, 1)
    cells = {kind: max(1, round(size * _WIDTH / whole)) for kind, size in parts.items() if size > 0}
    if cells:
        # What was rounded up comes out of the largest, so that the whole is as wide as ever.
        largest = max(cells, key=lambda kind: cells[kind])
        cells[largest] += _WIDTH - sum(cells.values())
    drawn = "".join(MARKS[kind] * number for kind, number in cells.items())
    if asked > device_bytes:
        end = min(_WIDTH - 1, device_bytes * _WIDTH // whole)
        return f"[{drawn[:end]}|{drawn[end:]}]"
    return f"[{drawn}]"
