"""Draws a device's memory as a bar of plain characters with a legend. It is readable on light and dark screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.tables import plain_table
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

_WIDTH = 64
MARKS = {"weights": "#", "kv_cache": "=", "activation": "+", "reserve": "x", "free": "."}
# In the order of the bar.
_KINDS = tuple(MARKS)


def print_bar(fit: documents.Fit, console: Console) -> None:
    """Print the bar, then a line for each part. If it does not fit, a `|` in the bar marks the end of the device."""
    lines, device = fit["lines"] or [], fit["device_bytes"] or 0
    parts = {kind: sum(line["bytes"] for line in lines if line["kind"] == kind) for kind in _KINDS}
    console.print(bar(parts, device, min(_WIDTH, console.width - 3)))
    table = plain_table("", ">", ">")
    for line in sorted(lines, key=lambda line: _KINDS.index(line["kind"])):
        is_free, is_missing = line["kind"] == "free", line["bytes"] < 0
        name = "  missing" if is_missing else f"{MARKS[line['kind']]} {line['name']}"
        size = format_size(abs(line["bytes"]), capacity=is_free and not is_missing)
        share = f"{100 * abs(line['bytes']) / device:.1f} %"
        table.add_row(name, size, share, style="bold" if is_missing else "")
    console.print(table)


def bar(parts: dict[str, int], device_bytes: int, width: int = _WIDTH) -> str:
    """The bar as text with `width` marks, such as `[####===++xx....]`.

    Each part that is not empty has at least one mark. If the parts need more memory than the device has, a `|` marks
    the end of the device.
    """
    asked = sum(size for kind, size in parts.items() if kind != "free")
    whole = max(asked, device_bytes, 1)
    cells = {kind: max(1, round(size * width / whole)) for kind, size in parts.items() if size > 0}
    if cells:
        # Take the rounding from the largest part, so that the bar always has the same width.
        largest = max(cells, key=lambda kind: cells[kind])
        cells[largest] += width - sum(cells.values())
    drawn = "".join(MARKS[kind] * number for kind, number in cells.items())
    if asked > device_bytes:
        end = min(width - 1, device_bytes * width // whole)
        return f"[{drawn[:end]}|{drawn[end:]}]"
    return f"[{drawn}]"
