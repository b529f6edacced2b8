"""Parts that the reports of several kinds of documents share: rows as tables, a device's memory, a step's time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvcalc.notes import sentence
from kvcalc.output.human.figures import (
    UNKNOWN_RANGE,
    count,
    describe_workload,
    duration,
    name_engine,
    percent,
    rate,
    room,
    size,
    span,
    split,
)
from kvcalc.output.human.server import headline
from kvcalc.output.human.speed import name_of_part
from kvcalc.output.report.charts import bar
from kvcalc.output.report.page import Section, Table, facts, figure
from kvcalc.writing.html import Markup

Document = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""A heading (`>` for numbers), the key of the values, and the function that writes one."""

_MEMORY_CLASSES = {"weights": "f0", "kv_cache": "f1", "activation": "f2", "reserve": "f6", "free": "f7"}


def table_of(caption: str, rows: Iterable[Document], columns: Sequence[Column], marked: int | None = None) -> Table:
    """A table of a document's rows. Columns without any value are left out."""
    rows = list(rows)
    shown = [column for column in columns if any(row[column[1]] is not None for row in rows)]
    cells = [["-" if row[key] is None else write(row[key]) for _, key, write in shown] for row in rows]
    return Table(caption, [heading for heading, _, _ in shown], cells, marked)


def facts_of(rows: Iterable[tuple[str, str | None]]) -> Markup:
    """Names and values. Values that are None are left out."""
    return facts((name, value) for name, value in rows if value is not None)


def warnings_of(document: Document) -> list[str]:
    """The warnings of a document as sentences."""
    return [sentence(warning) for warning in document.get("warnings", ())]


def devices_of(document: Document) -> str | None:
    """The devices as text, such as `4 x h100-sxm, tp 4`. None if there are none."""
    hardware = document["hardware"]
    if hardware is None:
        return None
    layout = split({"data_parallel_size": 1, **document["engine"]})
    return ", ".join(filter(None, (f"{hardware['num_devices']} x {hardware['name']}", layout)))


def subtitle_of(document: Document) -> str:
    """The workload, the types, the engine and the devices of an estimate in one line."""
    parts = [*describe_workload(document["workload"]), f"cache {document['kv_cache']['dtype']}"]
    parts += [name_engine(document["engine"]), devices_of(document) or ""]
    return ", ".join(filter(None, parts))


def verdict_of(document: Document, within: str = "") -> tuple[str, str]:
    """The first line of the screen about a server, and its tone. Empty if it is not known whether the model fits."""
    fit, server = document["fit"], document["server"]
    if fit is None:
        return "", "plain"
    is_good = fit["fits"] if server is None else server["starts"]
    tone = "plain" if is_good is None else "good" if is_good else "bad"
    return f"{headline(document, within)}.", tone


def memory_section(fit: Document) -> Section:
    """The bar of a device's memory, and the limits."""
    limits = facts_of(
        [
            ("longest context", None if (most := fit["max_context_tokens"]) is None else f"{count(most)} tokens"),
            ("largest batch", None if fit["max_batch_size"] is None else f"{count(fit['max_batch_size'])} sequences"),
        ]
    )
    if not fit["lines"]:
        return Section("Memory", [facts_of([("KV cache", size(fit["kv_cache_bytes"]))]), limits])
    device = fit["device_bytes"]
    lines = [line for line in fit["lines"] if line["bytes"]]
    classes = [_MEMORY_CLASSES[line["kind"]] for line in lines]
    drawn = [(line["name"], line["bytes"], kind) for line, kind in zip(lines, classes) if line["bytes"] > 0]
    rows = [
        (
            "missing" if line["bytes"] < 0 else line["name"],
            room(line["bytes"]) if line["kind"] == "free" and line["bytes"] > 0 else size(abs(line["bytes"])),
            count(abs(line["bytes"])),
            f"{100 * abs(line['bytes']) / device:.1f} %",
        )
        for line in lines
    ]
    caption = f"One device of {room(device)}"
    table = Table(caption, ["part", ">size", ">bytes", ">share"], rows, swatches=classes)
    return Section("Memory of one device", [figure(bar("Memory of one device", drawn, device), table), limits])


def _range(times: Mapping[str, Any], metric: str) -> str:
    low, high = times[f"{metric}low_seconds"], times[f"{metric}high_seconds"]
    return UNKNOWN_RANGE if low is None or high is None else span(None, low, high)


def step_section(throughput: Document) -> Section:
    """The time of a decode step and its parts, and serving."""
    parts = [
        (name_of_part(name.removesuffix("_seconds")), seconds)
        for name, seconds in throughput["parts"].items()
        if seconds
    ]
    total = throughput["decode_step_seconds"]
    classes = [f"f{place}" for place in range(len(parts))]
    rows = [(name, duration(seconds), percent(seconds / total)) for name, seconds in parts]
    table = Table(f"One step of {duration(total)}", ["part", ">time", ">share"], rows, swatches=classes)
    svg = bar("Parts of a decode step", [(name, seconds, kind) for (name, seconds), kind in zip(parts, classes)])
    blocks: list[Any] = [
        facts_of(
            [
                ("decode step", f"{duration(total)} ({_range(throughput, '')})"),
                ("tokens per second", rate(throughput["decode_tokens_per_second"])),
                ("prefill", duration(throughput["prefill_seconds"])),
                ("bound by", throughput["bound_by"]),
            ]
        ),
        figure(svg, table),
    ]
    serving = throughput["serving"]
    if serving is not None:
        ttft, tpot = (
            f"{duration(serving[f'{prefix}seconds'])} ({_range(serving, prefix)})" for prefix in ("ttft_", "tpot_")
        )
        blocks.append(
            facts_of(
                [
                    ("requests", f"{count(serving['running_requests'])} of {count(serving['concurrency'])} running"),
                    ("time to first token", ttft),
                    ("time per output token", tpot),
                    ("output tokens per second", rate(serving["tokens_per_second"])),
                    ("requests per second", rate(serving["requests_per_second"])),
                ]
            )
        )
    return Section("Speed, with the 80 % range", blocks)


def round_size(value: float) -> str:
    """Bytes without decimals that are zero, for the ticks of an axis."""
    number, unit = size(int(value)).split()
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
