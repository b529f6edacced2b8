"""Human output of `kvcalc fit`: the verdict, a bar of the device's memory, and the limits."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from kvcalc.output.human.console import count, describe_workload, name_engine, plain_table, split
from kvcalc.output.human.memory_bar import print_bar
from kvcalc.units import format_size


def render(document: dict[str, Any], console: Console) -> None:
    """Print the fit document."""
    engine, hardware = document["engine"], document["hardware"]
    console.print(Text.assemble((document["model"]["name"], "bold"), f" on {describe_devices(hardware, engine)}"))
    kinds = [f"weights {document['weights']['dtype']}", f"cache {document['kv_cache']['dtype']}"]
    console.print(", ".join([*describe_workload(document["workload"]), *kinds, name_engine(engine)]))
    if hardware["note"]:
        console.print(f"{hardware['name']}: {hardware['note']}", style="dim")
    console.print()
    print_verdict(document, console)
    if document["smallest"]:
        smallest = document["smallest"]
        stages = smallest["pipeline_parallel_size"]
        layout = f"--tp {smallest['tensor_parallel_size']}" + (f" --pp {stages}" if stages > 1 else "")
        console.print(f"it fits on {count(smallest['num_devices'])} of these devices: {layout}")


def print_verdict(document: dict[str, Any], console: Console) -> None:
    """Print whether it fits, the memory bar and the limits."""
    fit = document["fit"]
    verdict = ("fits", "bold green") if fit["fits"] else ("does not fit", "bold red")
    memory = format_size(max(fit["kv_cache_memory_bytes"], 0), capacity=True)
    console.print(Text.assemble(verdict, f": {memory} per device for the KV cache"))
    if waiting := _waiting(document):
        console.print(waiting)
    print_bar(fit, console)
    print_limits(document, console)


def _waiting(document: dict[str, Any]) -> str:
    """How many of the requests fit at their full length and how many run, if these are not all. Empty otherwise."""
    workload, speed = document["workload"], document.get("throughput")
    fitting, wanted = workload["batch_size"], workload["concurrency"]
    if not document["fit"]["fits"] or wanted is None or fitting >= wanted:
        return ""
    running = speed["serving"]["running_requests"] if speed else None
    if running is None:
        return f"{count(fitting)} of {count(wanted)} requests fit at full length"
    text = f"{count(running)} of {count(wanted)} requests run, {count(wanted - running)} wait"
    return text if running == fitting else f"{text}; {count(fitting)} fit at full length"


def print_limits(document: dict[str, Any], console: Console) -> None:
    """Print the longest context and the largest batch."""
    fit, workload = document["fit"], document["workload"]
    tokens, batch = describe_workload(workload)
    table = plain_table("", ">")
    table.add_row(f"longest context at {batch}", _limit(fit["max_context_tokens"], "tokens"))
    table.add_row(f"largest batch at {tokens}", _limit(fit["max_batch_size"], "sequences"))
    console.print(table)


def _limit(value: int | None, unit: str) -> str:
    return "no limit" if value is None else f"{count(value)} {unit if value != 1 else unit[:-1]}"


def describe_devices(hardware: dict[str, Any], engine: dict[str, Any]) -> str:
    """The devices as text, such as `4 x h100-sxm of 79.10 GiB, tp 4`."""
    number = f"{count(hardware['num_devices'])} x " if hardware["num_devices"] > 1 else ""
    name = "custom device" if hardware["name"] == "custom" else hardware["name"]
    text = f"{number}{name} of {format_size(hardware['memory_bytes'], capacity=True)}"
    if devices := split(engine):
        text += f", {devices}"
    if hardware["replicas"] > 1:
        text += f", {count(hardware['replicas'])} replicas"
    return text
