"""The report of `kvcalc simulate`: the rates, the percentiles, and the replicas over time."""

from __future__ import annotations

from typing import Any

from kvcalc.output.human.figures import count, duration, duration_or_overloaded, name_engine, rate
from kvcalc.output.human.simulate import NAMES, describe_limits, describe_load, describe_state, shown_times
from kvcalc.output.report.charts import Axis, Line, lines
from kvcalc.output.report.load import load_section
from kvcalc.output.report.page import Answer, Part, Section, Table, figure, paragraph
from kvcalc.output.report.parts import Document, devices_of, facts_of, table_of, warnings_of

_TIME = Axis("time from the first arrival", duration, is_linear=True)
_PERCENTILES: list[Any] = [
    ("time", "metric", lambda metric: NAMES.get(metric, metric)),
    (">mean", "mean_seconds", duration_or_overloaded), (">p50", "p50_seconds", duration_or_overloaded),
    (">p90", "p90_seconds", duration_or_overloaded), (">p99", "p99_seconds", duration_or_overloaded),
    (">max", "max_seconds", duration_or_overloaded),
]  # fmt: skip


def simulation(document: Document) -> Answer:
    """What the report of a simulation shows."""
    results, load = document["results"], document["load"]
    unit, asked = (
        ("clients", load["concurrency"])
        if load["concurrency"]
        else ("requests per second", load["requests_per_second"] or results["requests_per_second"])
    )
    # A good request has each of its own times within the limits, so every percentile is drawn with them.
    limits = [
        (metric.upper(), "each", document["limits"][f"max_{metric}_seconds"]) for metric in ("ttft", "tpot")
        if document["limits"][f"max_{metric}_seconds"] is not None
    ]  # fmt: skip
    curve = load_section(document.get("load_curve", ()), unit, asked, limits)
    facts = facts_of(
        [
            ("requests per second", rate(results["requests_per_second"])),
            ("output tokens per second", rate(results["tokens_per_second"])),
            ("good requests", _good(document)),
            ("duration", duration(results["duration_seconds"])),
            ("prompt tokens found in the cache", count(results["cached_tokens"]) if results["cached_tokens"] else None),
        ]
    )
    state = [paragraph(f"{text[0].upper()}{text[1:]}.") for text in describe_state(document)]
    sections = [
        Section("Rates", [facts]),
        Section("Times", [table_of("What clients see", shown_times(document), _PERCENTILES)]),
        *([curve] if curve is not None else []),
        Section("Over time", [*_charts(document), *state]),
    ]
    subtitle = [name_engine(document["engine"]), devices_of(document) or "", describe_load(document)]
    verdict, tone = _verdict(document)
    return Answer(
        document["model"]["name"], ", ".join(filter(None, subtitle)), verdict, tone, sections, warnings_of(document)
    )


def _good(document: Document) -> str | None:
    results = document["results"]
    if results["good_requests"] is None:
        return None
    good = f"{count(results['good_requests'])} of {count(results['requests'])}"
    return f"{good}, {rate(results['goodput_requests_per_second'])} per second"


def _verdict(document: Document) -> tuple[str, str]:
    results = document["results"]
    good, requests = results["good_requests"], results["requests"]
    if not results["keeps_up"]:
        return "Overloaded: requests arrive faster than they are served.", "bad"
    if good is None:
        tokens = rate(results["tokens_per_second"])
        return f"{rate(results['requests_per_second'])} requests and {tokens} tokens per second.", "plain"
    tone = "good" if good == requests else "plain" if good else "bad"
    return f"{good / requests:.1%} of the requests meet {describe_limits(document['limits'])}.", tone


def _charts(document: Document) -> list[Part]:
    """The requests over time, and the used blocks, each with a table of the same figures."""
    rows, engine = document["timeline"], document["engine"]
    requests = table_of(
        "Requests over time", rows,
        [(">time", "seconds", duration), (">waiting", "waiting_requests", count),
         (">running", "running_requests", count)],
    )  # fmt: skip
    charts = [_chart("Waiting and running requests over time", "requests", requests, rows, ("waiting", "running"))]
    if engine["blocks"] is None:
        return charts
    unit = "tokens" if engine["scheduler"] == "prefill first" else "blocks"
    used = table_of(
        f"Used {unit} over time", rows, [(">time", "seconds", duration), (f">used {unit}", "used_blocks", count)]
    )
    whole = engine["blocks"] * engine["data_parallel_size"] * document["hardware"]["replicas"]
    limit = [(f"all {count(whole)} {unit}", float(whole))]
    return [*charts, _chart(f"Used {unit} over time", unit, used, rows, ("used",), limit)]


def _chart(
    title: str, unit: str, table: Table, rows: list[Document], names: tuple[str, ...],
    limits: list[tuple[str, float]] | None = None,
) -> Part:  # fmt: skip
    keys = {"waiting": "waiting_requests", "running": "running_requests", "used": "used_blocks"}
    series = [Line(name, [(row["seconds"], row[keys[name]]) for row in rows]) for name in names]
    up = Axis(unit, lambda value: f"{value:,.4g}" if value < 1 else f"{value:,.0f}", is_linear=True)
    svg = lines(title, _TIME, up, series, limits or ())
    return figure(svg, table) if svg else table
