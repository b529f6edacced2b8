"""The part of a report with the times over the load: their limits, the load that was asked for, and the knee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcalc.output.human.figures import OVERLOADED, duration, rate
from kvcalc.output.report.charts import Axis, Line, lines
from kvcalc.output.report.page import Part, Section, Table, figure, paragraph

_METRICS = {"ttft": "TTFT", "tpot": "TPOT"}
_STATISTICS = ("mean", "p99")
_COLUMNS = (
    (">load", "load"), (">TTFT mean", "ttft_mean_seconds"), (">TTFT p99", "ttft_p99_seconds"),
    (">TPOT mean", "tpot_mean_seconds"), (">TPOT p99", "tpot_p99_seconds"),
)  # fmt: skip


def load_section(
    rows: Sequence[Mapping[str, Any]],
    unit: str,
    load: float | None,
    limits: Sequence[tuple[str, str, float]],
    mark: str = "asked",
) -> Section | None:
    """The section, or None without a curve. `limits` are metrics in capitals, statistics and seconds.

    `mark` names the load `load`.
    """
    known = [row for row in rows if row["tpot_mean_seconds"] is not None]
    if len(known) < 2:
        return None
    shown = [name for name in _STATISTICS if any(row.get(f"ttft_{name}_seconds") is not None for row in known)]
    parts: list[Part] = []
    columns = [row for row in _COLUMNS if row[1] == "load" or any(f"_{name}_" in row[1] for name in shown)]
    how = "; a short simulation of each load" if "p99" in shown else ""
    table = Table(
        f"Times over the load in {unit}, at the estimate{how}", [heading for heading, _ in columns],
        [[rate(row["load"]), *(_written(row, key) for _, key in columns[1:])] for row in rows],
    )  # fmt: skip
    marks = [(mark, load)] if load is not None else []
    if len(known) < len(rows):
        marks.append(("knee", known[-1]["load"]))
    for metric, name in _METRICS.items():
        series = [Line(part, [(row["load"], row[f"{metric}_{part}_seconds"]) for row in known]) for part in shown]
        limited = [(f"limit {duration(limit)} ({part})", limit) for of, part, limit in limits if of == name]
        svg = lines(
            f"{name} over the load", Axis(unit, rate, is_linear=True), Axis(name, duration, is_linear=True), series,
            limited, marks,
        )  # fmt: skip
        parts.append(figure(svg, table if metric == "tpot" else None))
    if len(known) < len(rows):
        most, next_one = (rate(row["load"]) for row in (known[-1], rows[len(known)]))
        parts.append(paragraph(f"It keeps up with {most} {unit}. With {next_one} it is {OVERLOADED}."))
    return Section("Times over the load", parts)


def _written(row: Mapping[str, Any], key: str) -> str:
    seconds = row.get(key)
    return OVERLOADED if seconds is None else duration(seconds)
