"""At which end of their ranges a plan compares times with its targets: one sentence for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.output.human.finalists import limits_of


def judged_text(document: Mapping[str, Any]) -> str:
    """Where the targets are judged, and for which rows not there, because their range is wide."""
    targets, simulated = document["targets"], is_simulated(document)
    how = "simulated with steps" if simulated else "judged"
    if targets["confidence"] <= 50:
        return f"{how} at the estimate"
    limited = {name for name, _, _ in limits_of(targets)}
    # A simulation slows all its steps by the range of TPOT, so that requests also wait longer.
    metrics = ["TPOT"] if simulated else [name for name in ("TTFT", "TPOT") if limited & {name, "E2E"}]
    ends: dict[str, list[str]] = {"upper_end": [], "estimate": []}
    for name in metrics:
        for row in document["plans"]:
            device = name_of_row(document, row)
            if (end := row[f"{name.lower()}_judged_at"]) is not None:
                ends[end].append(device if simulated else f"{name} of {device}")
    if not ends["estimate"]:
        return f"{how} at the upper end of the range"
    if not ends["upper_end"]:
        return f"{how} at the estimate, because a layout's range is wide"
    wide = ", ".join(ends["estimate"])
    return f"{how} at the upper end of the range, but at the estimate where a layout's range is wide: {wide}"


def is_simulated(document: Mapping[str, Any]) -> bool:
    """Whether the simulation chose the layouts: for percentiles, and for every target with a trace."""
    limits = limits_of(document["targets"])
    return any(document["trace"] or statistic != "mean" for _, statistic, _ in limits)


def name_of_row(document: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The device of a row, and its engine and type of weights if the plan has several."""
    parts = [row["engine"]] if len(document["engines"]) > 1 else []
    parts += [row["weights_dtype"]] if has_types(document) and row["weights_dtype"] else []
    return f"{row['gpu']} with {' and '.join(parts)}" if parts else row["gpu"]


def has_types(document: Mapping[str, Any]) -> bool:
    """Whether several types of weights were asked for."""
    return "," in (document["dtype"] or "")
