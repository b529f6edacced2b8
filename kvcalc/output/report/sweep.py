"""The report of `kvcalc sweep`, and its chart, which `--plot` draws to a file."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from kvcalc.output.human.figures import count, duration, rate, room, size, text
from kvcalc.output.report.charts import Axis, Line, lines
from kvcalc.output.report.page import Answer, Section, figure
from kvcalc.output.report.parts import Document, round_size, table_of, warnings_of
from kvcalc.writing.html import Markup

TOKENS = Axis("context, tokens", lambda value: f"{value:,.0f}")
_LONGEST_LABEL = 64


def memory_chart(chart: Mapping[str, Any]) -> Markup:
    """Memory over context, with the memory of devices as limits. Empty with fewer than two contexts."""
    series = [
        Line(line["label"], [(x, y) for x, y in zip(chart["contexts"], line["bytes"]) if y is not None])
        for line in chart["lines"]
    ]
    limits = [
        (_short(f"{room(row['bytes'])} per device for the cache: {row['label']}".rstrip(": ")), float(row["bytes"]))
        for row in chart["capacities"]
    ]
    up = Axis(_short(f"{chart['title']}: memory on one device"), round_size, is_bytes=True)
    return lines("Memory of the cache on one device, over the context", TOKENS, up, series, limits)


def _short(label: str) -> str:
    return shorten(label, _LONGEST_LABEL, placeholder=" ...")


def sweep(document: Document) -> Answer:
    """What the report of a sweep shows."""
    points = document["points"]
    columns: list[Any] = [
        ("engine", "engine", text), ("KV type", "kv_dtype", text), ("device", "gpu", text),
        (">devices", "num_devices", count), (">tp", "tensor_parallel_size", count), (">batch", "batch_size", count),
        (">context", "context_tokens", count), (">total", "total_bytes", size),
        (">per device", "bytes_per_device", size),
        (">step", "decode_step_seconds", duration), (">tok/s", "decode_tokens_per_second", rate),
        ("fits", "fits", lambda fits: "yes" if fits else "no"),
    ]  # fmt: skip
    subtitle = f"{count(document['num_points'])} points"
    table = table_of(f"{count(len(points))} of {subtitle}", points, columns)
    svg = memory_chart(document["chart"]) if document.get("chart") else None
    fitting = [point for point in points if point["fits"]]
    verdict = f"{count(len(fitting))} of the points shown fit." if any(p["fits"] is not None for p in points) else ""
    section = Section("Memory over the context", [figure(svg, table) if svg else table])
    return Answer(document["model"]["name"], subtitle, verdict, "plain", [section], warnings_of(document))
