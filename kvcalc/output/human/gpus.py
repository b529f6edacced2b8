"""Human output of `kvcalc gpus` and `kvcalc gpus show`."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import count
from kvcalc.output.human.tables import Text, plain_table
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

_CAPTION = (
    "16 bit (bf16, or fp16 if there is no bf16) and fp8: dense TFLOPS. link: GB/s out of one device, and how many are "
    "joined. kvcalc gpus NAME shows the rest and the source."
)


def render(document: documents.Gpus, console: Console) -> None:
    """Print the list, with a heading for each vendor."""
    table = plain_table("device", ">memory", ">GB/s", ">16 bit", ">fp8", ">link", optional=("link", "fp8", "16 bit"))
    for vendor, rows in groupby(document["gpus"], lambda row: row["vendor"]):
        table.add_row(Text(vendor, "bold"))
        for row in rows:
            memory, joined = format_size(row["memory_bytes"], capacity=True), row["interconnect"]
            link = "-" if joined is None else f"{_figure(joined['bytes_per_second'], 10**9)} x {joined['devices']:,}"
            rates = row["flops_per_second"]
            flops = [_figure(rate, 10**12) for rate in (rates.get("bf16") or rates.get("fp16"), rates.get("fp8"))]
            table.add_row(f"  {row['name']}", memory, _figure(row["bandwidth_bytes_per_second"], 10**9), *flops, link)
    console.print(table)
    console.print(_CAPTION)


def render_show(document: documents.GpusShow, console: Console) -> None:
    """Print one device's figures and their source."""
    console.print(Text.assemble((document["name"], "bold"), f"  {document['vendor']}, {document['device_class']}"))
    if document["aliases"]:
        console.print(f"also {', '.join(document['aliases'])}")
    console.print(f"source {document['source']} ({document['date']})")
    if document["note"]:
        console.print(document["note"])
    console.print()
    table = plain_table("", ">", "")
    memory = document["memory_bytes"]
    table.add_row("memory", format_size(memory, capacity=True), f"{document['memory_type']}, {count(memory)} bytes")
    unit = "GB/s, less with ECC" if document["inline_ecc"] else "GB/s"
    table.add_row("bandwidth", _figure(document["bandwidth_bytes_per_second"], 10**9), unit)
    for dtype, value in document["flops_per_second"].items():
        table.add_row(dtype, _figure(value, 10**12), "dense TFLOPS")
    joined = document["interconnect"]
    if joined:
        rate = _figure(joined["bytes_per_second"], 10**9)
        table.add_row("link", rate, f"GB/s one direction: {joined['name']}, joins {count(joined['devices'])}")
    if document["pcie_bytes_per_second"]:
        table.add_row("PCIe", _figure(document["pcie_bytes_per_second"], 10**9), "GB/s one direction")
    rate = _figure(document["network_bytes_per_second"], 10**9)
    most = count(document["machine_devices"])
    table.add_row("network", rate, f"GB/s one direction, between machines of up to {most}")
    if document["tdp_watts"]:
        table.add_row("power", count(document["tdp_watts"]), "W")
    console.print(table)


def _figure(value: int | None, scale: int) -> str:
    """A published figure in units of `scale`, with a decimal only if it has one, or a dash for None."""
    return f"{value / scale:,.1f}".removesuffix(".0") if value else "-"
