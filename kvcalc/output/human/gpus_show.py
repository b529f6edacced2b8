"""`kvcalc gpus show` for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, plain_table
from kvcalc.output.human.gpus import figure
from kvcalc.units import format_size


def render(document: dict[str, Any], console: Console) -> None:
    """Print one device's figures and their source."""
    console.print(Text.assemble((document["name"], "bold"), f"  {document['vendor']}, {document['device_class']}"))
    if document["aliases"]:
        console.print(f"also {', '.join(document['aliases'])}")
    console.print(f"source {document['source']} ({document['date']})")
    if document["note"]:
        console.print(document["note"])
    console.print()
    table = plain_table(("", "left"), ("", "right"), ("", "left"))
    table.show_header = False
    memory = document["memory_bytes"]
    table.add_row("memory", format_size(memory, capacity=True), f"{document['memory_type']}, {count(memory)} bytes")
    table.add_row("bandwidth", figure(document["bandwidth_bytes_per_second"], 10**9), "GB/s")
    for dtype, value in document["flops_per_second"].items():
        table.add_row(dtype, figure(value, 10**12), "dense TFLOPS")
    joined = document["interconnect"]
    if joined:
        rate = figure(joined["bytes_per_second"], 10**9)
        table.add_row("link", rate, f"GB/s one direction: {joined['name']}, joins {count(joined['devices'])}")
    if document["pcie_bytes_per_second"]:
        table.add_row("PCIe", figure(document["pcie_bytes_per_second"], 10**9), "GB/s one direction")
    if document["tdp_watts"]:
        table.add_row("power", count(document["tdp_watts"]), "W")
    console.print(table)
