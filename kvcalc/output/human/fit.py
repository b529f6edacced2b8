"""Human output of `kvcalc fit`: the verdict, a bar of the device's memory, and the limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.output.human.console import Console
from kvcalc.output.human.figures import (
    count,
    describe_images,
    describe_workload,
    duration,
    judged_with,
    name_engine,
    split,
)
from kvcalc.output.human.server import headline, print_server, short_name
from kvcalc.output.human.tables import Text, plain_table
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

    Answered = documents.Estimate | documents.FitDocument


def render(document: documents.FitDocument, console: Console) -> None:
    """Print the fit document."""
    console.print(headline(document))
    _print_answer(document, console, with_command=True)


def _print_answer(document: documents.FitDocument, console: Console, *, with_command: bool) -> None:
    """Print the answer below its first line."""
    engine, hardware = document["engine"], document["hardware"]
    console.print(Text.assemble((document["model"]["name"], "bold"), f" on {describe_devices(hardware, engine)}"))
    workload = [*describe_workload(document["workload"]), *describe_images(document["workload"])]
    kinds = [f"weights {document['weights']['dtype']}", f"cache {document['kv_cache']['dtype']}"]
    # The first line has the name of a server, without the program and the package that its rules are from.
    is_named = document["server"] is not None and name_engine(engine) == short_name(engine)
    console.print(", ".join([*workload, *kinds, *([] if is_named else [name_engine(engine)])]))
    if hardware["note"]:
        console.print(f"{hardware['name']}: {hardware['note']}", style="dim")
    print_server(document, console, with_command=with_command)
    console.print()
    print_memory(document, document["fit"], console)
    if "reuse" in document:
        from kvcalc.output.human.reuse import print_reuse

        console.print()
        print_reuse(document["reuse"], document["fit"], console)
    print_changes(document, console)
    if "sources" in document:
        from kvcalc.output.human.explained import print_reserve, print_sources

        console.print()
        print_sources(document["sources"], document["engine"], console)
        print_reserve(document, console)


def print_changes(document: documents.FitDocument, console: Console) -> None:
    """Print with how many devices, or how much in host memory, it would fit. Nothing if it fits."""
    if document["smallest"]:
        smallest = document["smallest"]
        sizes = {
            "tp": smallest["tensor_parallel_size"], "pp": smallest["pipeline_parallel_size"],
            "dp": smallest["data_parallel_size"],
        }  # fmt: skip
        layout = " ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        console.print(f"it fits on {count(smallest['num_devices'])} of these devices: {layout}")
    if offload := document["offload"]:
        for moved, option in ((offload["n_gpu_layers"], "-ngl"), (offload["n_cpu_moe"], "--n-cpu-moe")):
            if moved is not None:
                held = format_size(moved["host_bytes"])
                console.print(f"it fits with {option} {moved['value']}: {held} are then in host memory")


def print_memory(document: Answered, fit: documents.Fit, console: Console) -> None:
    """Print why the workload does not fit, unless the first line says it, the memory bar and the limits."""
    server = document["server"]
    if server is None or server["starts"]:
        for note in document["warnings"]:
            if (note["part"], note["code"]) == ("fit", "does-not-fit"):
                console.print(note["text"])
    if waiting := _waiting(document, fit):
        console.print(waiting)
    print_bar(fit, console)
    if fit["free_low_bytes"] is not None and fit["free_high_bytes"] is not None:
        ends = (_signed(fit["free_low_bytes"]), _signed(fit["free_high_bytes"]))
        console.print(f"80 % range of the free memory: {' to '.join(ends)}", style="dim")
    if fit["host"] is not None:
        _host(fit["host"], console)
    if fit["devices"] is not None:
        _devices(fit["devices"], console)
    print_limits(document, fit, console)


def _signed(size: int) -> str:
    """A size that may be negative, towards less memory."""
    return f"-{format_size(-size)}" if size < 0 else format_size(size, capacity=True)


def _host(host: documents.HostShare, console: Console) -> None:
    """Print the part of the model in host memory."""
    parts = [f"weights {format_size(host['weights_bytes'])}", f"cache {format_size(host['kv_cache_bytes'])}"]
    line = f"{format_size(host['host_bytes'])}: {', '.join(parts)}"
    if host["memory_bytes"] is not None:
        memory = format_size(host["memory_bytes"], capacity=True)
        line += f"; {'fits' if (host['host_free_bytes'] or 0) >= 0 else 'does not fit'} in {memory}"
    where = [f"-ngl {host['n_gpu_layers']}"]
    where += [f"--n-cpu-moe {host['n_cpu_moe']}"] if host["n_cpu_moe"] else []
    where += [] if host["kv_offload"] else ["--no-kv-offload"]
    console.print(Text.assemble(("host", "bold"), f"  {line} ({' '.join(where)})"))


def _devices(devices: list[documents.DeviceShare], console: Console) -> None:
    """Print what each device holds, if they have different layers. The bar is of the one with the least free memory."""
    table = plain_table("device", ">layers", ">weights", ">cache", ">free", "")
    for row in devices:
        layers = "none" if row["first_layer"] is None else f"{row['first_layer']}-{row['last_layer']}"
        sizes = format_size(row["weights_bytes"]), format_size(row["kv_cache_bytes"])
        free = format_size(max(row["free_bytes"], 0), capacity=True)
        table.add_row(str(row["device"]), layers, *sizes, free, "" if row["fits"] else "does not fit")
    console.print(table)


def _waiting(document: Answered, fit: documents.Fit) -> str:
    """How many of the requests fit at their full length and how many run, if these are not all. Empty otherwise."""
    workload = document["workload"]
    speed: Any = document.get("throughput")
    fitting, wanted = workload["batch_size"], workload["concurrency"]
    if not fit["fits"] or wanted is None or fitting >= wanted:
        return ""
    running = speed["serving"]["running_requests"] if speed and speed["serving"] else None
    if running is None:
        return f"{count(fitting)} of {count(wanted)} requests fit at full length"
    text = f"{count(running)} of {count(wanted)} requests run, {count(wanted - running)} wait"
    return text if running == fitting else f"{text}; {count(fitting)} fit at full length"


def print_limits(document: Answered, fit: documents.Fit, console: Console) -> None:
    """Print the longest context and the largest batch."""
    tokens, batch = describe_workload(document["workload"])
    table = plain_table("", ">")
    sure = fit["sure_context_tokens"]
    table.add_row(f"longest context at {batch}", _limit(fit["max_context_tokens"], "tokens"))
    if sure is not None and sure != fit["max_context_tokens"]:
        table.add_row("  with the least free memory", _limit(sure, "tokens"))
    table.add_row(f"largest batch at {tokens}", _limit(fit["max_batch_size"], "sequences"))
    console.print(table)


def _limit(value: int | None, unit: str) -> str:
    return "no limit" if value is None else f"{count(value)} {unit if value != 1 else unit[:-1]}"


def describe_devices(hardware: documents.Hardware, engine: Mapping[str, object]) -> str:
    """The devices as text, such as `4 x h100-sxm of 79.10 GiB, tp 4`."""
    number = f"{count(hardware['num_devices'])} x " if hardware["num_devices"] > 1 else ""
    name = "custom device" if hardware["name"] == "custom" else hardware["name"]
    text = f"{number}{name} of {format_size(hardware['memory_bytes'], capacity=True)}"
    if devices := split(engine):
        text += f", {devices}"
    if hardware["replicas"] > 1:
        text += f", {count(hardware['replicas'])} replicas"
    return text


# Draws a device's memory as a bar of plain characters with a legend. It is readable on light and dark screens.

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
        if not line["bytes"] and line["high_bytes"]:  # it is not known, and not counted
            size, share = "not known", f"up to {format_size(line['high_bytes'])}"
        table.add_row(name, size, share, style="bold" if is_missing else "")
    console.print(table)


def bar(parts: dict[str, int], device_bytes: int, width: int = _WIDTH) -> str:
    """The bar as text with `width` marks, such as `[####===++xx....]`.

    Each part that is not empty has at least one mark. If the parts need more memory than the device has, a `|` marks
    the end of the device.
    """
    used = sum(size for kind, size in parts.items() if kind != "free")
    whole = max(used, device_bytes, 1)
    cells = {kind: max(1, round(size * width / whole)) for kind, size in parts.items() if size > 0}
    if cells:
        # Take the rounding from the largest part, so that the bar always has the same width.
        largest = max(cells, key=lambda kind: cells[kind])
        cells[largest] += width - sum(cells.values())
    drawn = "".join(MARKS[kind] * number for kind, number in cells.items())
    if used > device_bytes:
        end = device_bytes * width // whole
        return f"[{drawn[:end]}|{drawn[end:]}]"
    return f"[{drawn}]"


# Human output of `kvcalc check`: whether the server starts, its memory as `kvcalc fit` shows it, and its load.


def render_check(document: documents.Check, console: Console, within: str = "") -> None:
    """Print the check document. `within` has the targets of its load as text."""
    command, requests, capacity = document["command"], document["requests"], document["capacity"]
    if command["service"]:
        console.print(Text(command["service"], style="bold"))
    console.print(headline(document, within))
    memory: Any = {**document, "smallest": None, "offload": None}
    _print_answer(memory, console, with_command=False)
    if requests and not requests["refused"]:
        fitting = "any number" if requests["max_requests"] is None else count(requests["max_requests"])
        console.print(f"{fitting} requests of {_lengths(requests)} fit at once")
    if capacity is not None:
        console.print(judged_with(capacity["confidence"]))
    if capacity is not None and capacity["requests_per_second"]:
        for metric, mean, most in (
            ("TTFT", capacity["ttft_mean_seconds"], capacity["ttft_p99_seconds"]),
            ("TPOT", capacity["tpot_mean_seconds"], capacity["tpot_p99_seconds"]),
        ):
            console.print(f"{metric} at that rate: mean {duration(mean)}, p99 {duration(most)}")
        if capacity["limited_by"]:
            console.print(f"beyond that: {capacity['limited_by']}", style="dim")
    if document["advice"] is not None:
        from kvcalc.output.human.advice import print_advice

        print_advice(document, document["advice"], console)
    if "live" in document:
        from kvcalc.output.human.live import print_live

        print_live(document["live"], console)


def _lengths(requests: documents.CheckRequests) -> str:
    return f"{count(requests['input_tokens'])} + {count(requests['output_tokens'])} tokens"
