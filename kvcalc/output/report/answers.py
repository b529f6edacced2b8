"""What the report of each kind of document shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.output.human.figures import byte_rate, count, describe_workload, duration, percent, rate, share, size, text
from kvcalc.output.paths import scalars
from kvcalc.output.report.charts import Axis, Line, bars, lines
from kvcalc.output.report.deployment import check, money, plan
from kvcalc.output.report.load import load_section
from kvcalc.output.report.page import Answer, Part, Section, Table, facts, figure, paragraph
from kvcalc.output.report.parts import (
    Document,
    facts_of,
    memory_section,
    round_size,
    step_section,
    subtitle_of,
    table_of,
    verdict_of,
    warnings_of,
)
from kvcalc.output.report.simulation import simulation
from kvcalc.output.report.sweep import TOKENS, sweep
from kvcalc.writing.cells import bare
from kvcalc.writing.html import Markup

# The most rows of a table, and the most scalars of a document without a report of its own.
_MOST_ROWS = 1000


def answer_of(document: Document, kind: str) -> Answer:
    """What the report of a document shows. A kind without a report of its own shows all its values."""
    make: Callable[[Document], Answer] = _ANSWERS.get(kind, _any)
    return make(document)


def _estimate(document: Document) -> Answer:
    cache, fit, weights = document["kv_cache"], document["fit"], document["weights"]
    verdict, tone = verdict_of(document)
    sections = []
    if fit is not None:
        sections.append(memory_section(fit))
    formulas = [paragraph(f"{row['numbers']} = {count(row['bytes'])} bytes stored") for row in cache["formulas"]]
    totals = facts_of(
        [
            ("total", f"{size(cache['total_bytes'])} ({count(cache['total_bytes'])} bytes)"),
            ("per sequence", size(cache["bytes_per_sequence"])),
            ("fixed per sequence", size(cache["fixed_bytes_per_sequence"])),
            ("per token", f"{size(cache['bytes_per_token'])} ({count(cache['bytes_per_token'])} bytes)"),
            ("per device", size(cache["bytes_per_device"])),
            ("weights", None if weights["bytes"] is None else f"{size(weights['bytes'])} {weights['dtype'] or ''}"),
        ]
    )
    sections.append(Section("KV cache", [totals, *formulas]))
    speed = document["throughput"]
    if speed is not None:
        sections.append(step_section(speed))
        curve = load_section(document.get("load_curve", ()), "clients", document["workload"]["concurrency"], ())
        sections += [curve] if curve is not None else []
    variants = table_of(
        "The same model with other attention", [row for row in document["variants"] if row["reason"] is None],
        [("attention", "attention", str.upper), (">KV heads", "num_kv_heads", count), (">total", "total_bytes", size),
         (">bytes per token", "bytes_per_token", count), (">of MHA", "ratio_to_mha", percent)],
    )  # fmt: skip
    if variants.rows:
        sections.append(Section("Kinds of attention", [variants]))
    sections.append(Section("Settings of the engine", [_settings(document["engine"])]))
    title = document["model"]["name"]
    return Answer(
        title, subtitle_of(document), verdict or f"The cache takes {size(cache['total_bytes'])}.", tone, sections,
        warnings_of(document),
    )  # fmt: skip


def _settings(engine: Mapping[str, Any]) -> Markup:
    values = ((key.replace("_", " "), value) for key, value in engine.items() if not isinstance(value, list))
    return facts_of((name, None if value is None else _setting(value)) for name, value in values)


def _setting(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return bare(value)
    return count(value) if isinstance(value, int) else f"{value:,.4g}"


def _measure(document: Document) -> Answer:
    workload, device, runs = document["workload"], document["device"], document["runs"]
    differ = [run for run in runs if run["held_bytes"] != run["predicted_bytes"]]
    rows = [
        {**run, "step": run["decode_step_seconds"]["p50"], "p90": run["decode_step_seconds"]["p90"]} for run in runs
    ]
    columns: list[Any] = [
        ("attention", "attention", str.upper), (">predicted bytes", "predicted_bytes", count),
        (">held bytes", "held_bytes", count), (">tokens/s", "tokens_per_second", rate),
        (">step p50", "step", duration), (">p90", "p90", duration),
        (">KV read", "kv_read_bytes_per_second", byte_rate), ("kernel", "backend", text),
        ("self-check", "verified", lambda check: "ok" if check["ok"] else f"off by {check['max_abs_error']}"),
    ]  # fmt: skip
    sections = []
    if runs:
        svg = bars("Time of a step", [(row["attention"].upper(), row["step"]) for row in rows], duration)
        sections.append(Section("Runs", [figure(svg, table_of("Predicted and measured", rows, columns))]))
    if document["curve"]:
        sections.append(Section("Over the context", [_measured_curve(document["curve"])]))
    roof = document["roof"]
    sections.append(Section("Roofs of the device", [facts_of([("reads", byte_rate(roof["read_bytes_per_second"]))])]))
    subtitle = ", ".join([f"{device['kind']} ({device['name']})", *describe_workload(workload), workload["dtype"]])
    verdict = "Held and predicted bytes differ." if differ else "Held and predicted bytes are equal."
    failed = [run["attention"].upper() for run in runs if not run["verified"]["ok"]]
    if failed:
        differ, verdict = runs, f"The self-check of {', '.join(failed)} failed."
    return Answer(
        document["model"]["name"], subtitle, verdict, "bad" if differ else "good", sections, warnings_of(document)
    )  # fmt: skip


def _measured_curve(rows: list[Document]) -> Part:
    columns: list[Any] = [
        ("attention", "attention", str.upper), (">tokens", "context_tokens", count), (">batch", "batch_size", count),
        (">step p50", "decode_step_seconds", duration), (">tokens/s", "tokens_per_second", rate),
        ("kernel", "backend", text),
    ]  # fmt: skip
    table = table_of("Steps", rows, columns)
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = f"{row['attention'].upper()}, batch {row['batch_size']}"
        series.setdefault(label, []).append((row["context_tokens"], row["decode_step_seconds"]))
    drawn = [Line(label, points) for label, points in series.items()]
    svg = lines("Time of a step over the context", TOKENS, Axis("time of a step", duration), drawn)
    return figure(svg, table) if svg else table


def _prefix(document: Document) -> Answer:
    trace, knee, unlimited = document["trace"], document["knee"], document["unlimited"]
    has_bytes = knee["cache_bytes"] is not None
    key = "cache_bytes" if has_bytes else "cache_tokens"
    amount = size(knee[key]) if has_bytes else f"{count(knee[key])} tokens"
    columns: list[Any] = [
        (">cache", "cache_bytes", size), (">per device", "cache_bytes_per_device", size),
        (">tokens", "cache_tokens", count),
        (">hits", "hit_rate", share), (">prefill saved", "saved_prefill_share", share),
        (">saved per prompt", "saved_ttft_seconds", duration), (">saved GPU seconds", "saved_gpu_seconds", rate),
        (">device cost", "device_cost_per_gpu_second", money), (">cpu cost", "cpu_cost_per_gpu_second", money),
        (">disk cost", "disk_cost_per_gpu_second", money),
    ]  # fmt: skip
    if trace["sampling_rate"] < 1:
        columns[4:4] = [(">low", "hit_rate_low", share), (">high", "hit_rate_high", share)]
    rows = document["curve"]
    table = table_of("What a cache of each size finds", rows, columns)
    # The knee is a point of the line.
    points = sorted({(row[key], row["hit_rate"]) for row in (*rows, knee)})
    series = [Line("hits", points)]
    if trace["sampling_rate"] < 1:
        series += [Line(name, [(row[key], row[f"hit_rate_{name}"]) for row in rows]) for name in ("low", "high")]
    across = Axis("memory for the cache", round_size, is_bytes=True) if has_bytes else Axis("cache, tokens", count)
    svg = lines(
        "Hit rate over the size of the cache", across, Axis("hits", percent), series, marks=[("knee", float(knee[key]))]
    )
    sections = [Section("Hits", [figure(svg, table) if svg else table])]
    if document["tiers"]:
        tiers = table_of(
            "What each tier finds that the ones before it do not", document["tiers"],
            [("tier", "name", text), (">memory", "memory_bytes", size), (">hits", "hit_rate", share),
             (">prefill of the hits", "prefill_seconds", duration), (">loading them", "load_seconds", duration)],
        )  # fmt: skip
        sections.append(Section("Tiers", [tiers]))
    names = [document["model"]["name"], document["engine"]["name"]] if document["model"] is not None else []
    subtitle = ", ".join([f"{count(trace['num_requests'])} requests", *names])
    verdict = (
        f"A cache of {amount} finds {share(knee['hit_rate'])} of the prompt tokens; "
        f"without a limit, {share(unlimited['hit_rate'])}."
    )
    return Answer(trace["file"], subtitle, verdict, "plain", sections, warnings_of(document))


def _any(document: Document) -> Answer:
    model = document.get("model")
    title = model["name"] if isinstance(model, Mapping) else "kvcalc"
    sections = []
    rest = {}
    for key, value in document.items():
        if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value) and key != "warnings":
            columns = [name for name, cell in value[0].items() if not isinstance(cell, (list, dict))]
            cells = [
                ["-" if row.get(name) is None else bare(row[name]) for name in columns] for row in value[:_MOST_ROWS]
            ]
            sections.append(Section(key.replace("_", " "), [Table(f"{count(len(value))} rows", columns, cells)]))
        elif key != "warnings":
            rest[key] = value
    rows = [(path, bare(value)) for path, value in scalars(rest)][:_MOST_ROWS]
    return Answer(title, "", "", "plain", [*sections, Section("Figures", [facts(rows)])], warnings_of(document))


_ANSWERS: dict[str, Callable[[Document], Answer]] = {
    "estimate": _estimate, "plan": plan, "check": check, "sweep": sweep, "measure": _measure, "prefix": _prefix,
    "simulate": simulation,
}  # fmt: skip
