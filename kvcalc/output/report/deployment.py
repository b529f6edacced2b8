"""The reports of `kvcalc plan` and `kvcalc check`: the pages with which one decides about a deployment."""

from __future__ import annotations

from typing import Any

from kvcalc.output.human.figures import (
    OVERLOADED,
    UNKNOWN_RANGE,
    count,
    duration,
    judged_with,
    percent,
    rate,
    requests_per_second,
    room,
    span,
    text,
)
from kvcalc.output.human.layouts import (
    finalist_columns,
    finalist_rows,
    judged_text,
    layout_of,
    limits_of,
    question_of,
    targets_text,
)
from kvcalc.output.report.load import load_section
from kvcalc.output.report.page import Answer, Section, code, paragraph
from kvcalc.output.report.parts import (
    Document,
    facts_of,
    memory_section,
    subtitle_of,
    table_of,
    verdict_of,
    warnings_of,
)


def plan(document: Document) -> Answer:
    """What the report of a plan shows: the targets, the layout, why the others lost, and the times over the load."""
    plans, best, targets = document["plans"], document["best"], document["targets"]
    limits = limits_of(targets)
    wanted = targets_text(targets)
    facts = facts_of([
        ("requests", question_of(document)),
        ("targets", wanted or "none: the fewest devices"),
        ("method", judged_text(document) if wanted else None),
        ("headroom", percent(document["headroom"]) if document["headroom"] else None),
        ("router", document["router"]),
    ])  # fmt: skip
    sections = [Section("What was asked", [facts])]
    if best is not None:
        sections.append(Section("The layout", [_chosen(best, has_bar=document.get("fit") is not None)]))
    columns: list[Any] = [
        ("device", "gpu", text), ("engine", "engine", text), (">devices", "num_devices", count),
        ("layout", "layout", text), (">TTFT", "ttft_seconds", duration), (">TPOT", "tpot_seconds", duration),
        ("80 % range", "range", text), (">tok/s", "tokens_per_second", rate), (">busy", "utilization", percent),
        (">per hour", "cost_per_hour", money), (">per 1M out", "cost_per_million_output_tokens", money),
        ("why not", "why", text),
    ]  # fmt: skip
    rows = [
        {
            **row, "layout": layout_of(row), "why": row["reason"],
            "range": span(*(row[f"tpot_{end}seconds"] for end in ("", "low_", "high_"))),
        }
        for row in plans
    ]  # fmt: skip
    if len(document["engines"]) == 1:
        columns = [column for column in columns if column[1] != "engine"]
    marked = next((place for place, row in enumerate(plans) if row == best), None)
    parts: list[Any] = [table_of("The best layout of each kind of device, by means", rows, columns, marked)]
    lost = [
        f"{row['gpu']}, not {other}." for row in plans for other in (row["next_layout"], row.get("next_mode")) if other
    ]
    parts += map(paragraph, lost)
    sections.append(Section("Alternatives", parts))
    finalists = finalist_rows(document)
    if finalists:
        title = "Each layout as it is judged"
        shown = [{**row, "reason": _missed(row, limits)} for row in finalists]
        columns = [*finalist_columns(document), ("why not", "reason", text)]
        columns = [column for column in columns if column[1] != "verdict"]
        sections.append(Section("Simulated layouts", [table_of(title, shown, columns)]))
    unit, load = _load(targets)
    curve = load_section(document.get("load_curve", ()), unit, load, limits)
    sections += [curve] if curve is not None else []
    if document.get("fit") is not None:
        sections.append(memory_section(document["fit"]))
    if best is not None:
        own = (best.get("disaggregated") or {}).get("commands", {})
        started = (
            command for row in document["commands"]
            for command in (*(row["nodes"] or [row["command"]]), row["router"]) if command is not None
        )  # fmt: skip
        commands = [code(command) for command in (*own.values(), *started)]
        each = f", each of {count(best['replicas'])} replicas" if (best["replicas"] or 1) > 1 else ""
        sections.append(Section(f"Commands for {best['gpu']}{each}", commands))
    verdict, tone = "Nothing fits.", "bad"
    if best is not None:
        unit, load = _load(targets)
        serves = f"{_devices_of(best)} ({layout_of(best)}) serve {rate(load)} {unit}"
        meets = f" and meet {wanted}" if wanted else ""
        verdict, tone = f"{serves}{meets}.", "good"
    return Answer(document["model"]["name"], question_of(document), verdict, tone, sections, warnings_of(document))


def _missed(row: Document, limits: list[tuple[str, str, float]]) -> str | None:
    """The limits that a simulated layout misses, in a few words: the columns beside them have the times."""
    if row["passes"]:
        return None
    if not row["keeps_up"]:
        return OVERLOADED
    over = [
        f"{metric} above {duration(limit)}" for metric, statistic, limit in limits
        if row[f"{metric.lower()}_{statistic}_seconds"] > limit
    ]  # fmt: skip
    return ", ".join(over) or str(row["reason"])


def _chosen(row: Document, *, has_bar: bool) -> Any:
    """The figures of the chosen layout, with their ranges. The bar shows the free memory of the printed command."""
    simulated = [
        f"{metric.upper()} {duration(row[f'simulated_{metric}_seconds'])}"
        for metric in ("ttft", "tpot", "e2e") if row[f"simulated_{metric}_seconds"] is not None
    ]  # fmt: skip
    watts, energy = row["watts"], row["kwh_per_million_output_tokens"]
    return facts_of([
        ("devices", f"{_devices_of(row)}, {layout_of(row)}"),
        ("mean TTFT", _ranged(row, "ttft")),
        ("mean TPOT", _ranged(row, "tpot")),
        ("simulated, as judged", ", ".join(simulated) or None),
        ("output tokens per second", rate(row["tokens_per_second"])),
        ("busy", None if row["utilization"] is None else percent(row["utilization"])),
        ("requests that fit in a replica", None if row["max_batch_size"] is None else count(row["max_batch_size"])),
        ("free memory per device", None if has_bar or row["free_bytes"] is None else room(row["free_bytes"])),
        ("cost per hour", None if row["cost_per_hour"] is None else money(row["cost_per_hour"])),
        ("cost per million output tokens", money(row["cost_per_million_output_tokens"])
         if row["cost_per_million_output_tokens"] is not None else None),
        ("energy", None if energy is None else f"{energy:.3g} kWh per million output tokens, {rate(watts)} W"),
    ])  # fmt: skip


def _ranged(row: Document, metric: str) -> str | None:
    seconds, low, high = (row[f"{metric}_{end}seconds"] for end in ("", "low_", "high_"))
    if seconds is None:
        return None
    return f"{duration(seconds)} ({UNKNOWN_RANGE if low is None or high is None else span(seconds, low, high)})"


def check(document: Document) -> Answer:
    """What the report of a server's command shows: whether it starts, its memory, and the rate that it sustains."""
    command, capacity, requests = document["command"], document["capacity"], document["requests"]
    targets = document.get("targets")
    limits = [] if targets is None else limits_of(targets)
    sections = []
    if capacity is not None:
        times = [
            (f"{metric.upper()} there", ", ".join(
                f"{part} {duration(capacity[f'{metric}_{part}_seconds'])}" for part in ("mean", "p50", "p90", "p99")
            )) for metric in ("ttft", "tpot")
        ]  # fmt: skip
        facts = facts_of([
            ("targets", targets_text(targets) if targets else None),
            ("largest rate", requests_per_second(capacity["requests_per_second"])),
            ("method", judged_with(capacity["confidence"])),
            *times,
            ("beyond that", capacity["limited_by"]),
            ("requests at once", f"{count(requests['max_requests'])} of "
             f"{count(requests['input_tokens'])} + {count(requests['output_tokens'])} tokens" if requests else None),
        ])  # fmt: skip
        sections.append(Section("The load that it sustains", [facts]))
        rate = capacity["requests_per_second"]
        curve = load_section(document.get("load_curve", ()), "requests per second", rate, limits, "largest")
        sections += [curve] if curve is not None else []
    if document["server"]["try"]:
        changes = [(change["option"], change["value"]) for change in document["server"]["try"]]
        sections.append(Section("It starts with one of these", [facts_of(changes)]))
    sections.append(memory_section(document["fit"]))
    left = [("options that change nothing here", command["ignored"]), ("not counted", command["not_counted"])]
    known = [(name, ", ".join(words)) for name, words in left if words]
    if known:
        sections.append(Section("Options of the command", [facts_of(known)]))
    verdict, tone = verdict_of(document, targets_text(targets) if targets else "")
    title = " ".join(filter(None, (command["service"], document["model"]["name"])))
    return Answer(title, subtitle_of(document), verdict, tone, sections, warnings_of(document))


def _load(targets: Document) -> tuple[str, float | None]:
    for name, unit in (("users", "users"), ("concurrency", "clients")):
        if targets[name]:
            return unit, float(targets[name])
    return "requests per second", targets["requests_per_second"]


def _devices_of(row: Document) -> str:
    """The devices of a layout, such as `8 x h100-sxm`, or those of both pools if they are on different kinds."""
    pools = [row["disaggregated"][role] for role in ("prefill", "decode")] if row.get("disaggregated") else []
    if len({pool["gpu"] for pool in pools}) < 2:
        pools = [row]
    return " + ".join(f"{pool['num_devices']} x {pool['gpu']}" for pool in pools)


def money(value: float) -> str:
    """A price: two decimals, or two digits if it is small."""
    return f"{value:,.2f}" if value >= 0.1 or not value else f"{value:.2g}"
