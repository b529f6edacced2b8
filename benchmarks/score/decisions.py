"""Score decisions that are made from kvcalc's speeds: between layouts of a device, or between devices.

    python benchmarks/score/decisions.py POINTS.jsonl [--write docs/concepts/throughput.md]
    python benchmarks/score/decisions.py POINTS.jsonl --devices

A line of POINTS.jsonl is a measured point: `model`, `gpu`, `engine`, `release` and `dtype` (or null), the lengths `isl`
and `osl`, the `layout` (tp, ep, dp), `concurrency` clients that each ask again when they are answered, and the mean
`ttft` and `tpot` in seconds. What decides is the output tokens per second and device within a limit on TPOT.

Layouts: of the points whose judged TPOT is within the limit, the one with the most predicted tokens is deployed. Its
loss is the share of the best measured tokens that it does not reach, or all of them if its TPOT misses the limit by
more than 2 %. Groups in which no layout is judged to meet the limit have no plan and are counted. The table of the
manual has these for several levels of `--confidence`.

Devices: what a price decides by is the ratio of the best tokens of two devices under one engine and release. Its error
is predicted / measured - 1. The wrong device is paid for where it would win at equal prices.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import kvcalc
from benchmarks.score.throughput import write
from kvcalc.throughput.speed import judged_factor

BEGIN = "<!-- choices: python benchmarks/score/decisions.py POINTS.jsonl --write docs/concepts/throughput.md -->"
END = "<!-- end of choices -->"
LEVELS = (50, 60, 65, 70, 80, 90)
LIMITS = (0.02, 0.03, 0.05)
_MISSED = 1.02


class Point(NamedTuple):
    """TPOT in seconds and tokens per second and device of a layout: measured, and predicted.

    `high` is the factor from the predicted TPOT to the upper end of its range.
    """

    gpu: str
    tpot: float
    rate: float
    said_tpot: float
    high: float
    said_rate: float


class Choices(NamedTuple):
    """What was chosen within a limit: the loss of each choice, how many miss the limit, and groups without one."""

    losses: list[float]
    missed: int
    no_plan: int


def point(row: Mapping[str, Any]) -> Point | None:
    """A measured row and what kvcalc says about it. None if its speed is not known."""
    layout, release = row["layout"], row["release"] or ""
    tensor, ranks = layout.get("tp", 1), layout.get("dp", 1)
    speed = kvcalc.SpeedQuestion(
        expert_parallel_size=layout.get("ep"), input_tokens=row["isl"], output_tokens=row["osl"],
        concurrency=row["concurrency"], confidence=80, benchmark=True,
    )  # fmt: skip
    try:
        document = kvcalc.estimate(
            row["model"], engine=f"{row['engine']}@{release}" if re.match(r"\d+\.\d", release) else row["engine"],
            dtype=row["dtype"], devices=kvcalc.find_devices(f"{row['gpu']}x{tensor * ranks}"),
            tensor_parallel_size=tensor, data_parallel_size=ranks, speed=speed,
        )  # fmt: skip
    except kvcalc.KvcalcError:
        return None
    serving = document["throughput"] and document["throughput"]["serving"]
    if not serving:
        return None
    seconds = row["ttft"] + row["tpot"] * (row["osl"] - 1)
    return Point(
        row["gpu"], row["tpot"], row["concurrency"] * row["osl"] / seconds / (tensor * ranks),
        serving["tpot_seconds"], serving["tpot_judged_seconds"] / serving["tpot_seconds"],
        serving["tokens_per_second_per_device"],
    )  # fmt: skip


def choices(groups: Iterable[Sequence[Point]], limit: float, confidence: int) -> Choices:
    """The choices within a limit on TPOT in seconds. Groups without a measured point within it are left out."""
    losses, missed, no_plan = list[float](), 0, 0
    for points in groups:
        best = max((each.rate for each in points if each.tpot <= limit), default=None)
        if best is None:
            continue
        plan = [each for each in points if each.said_tpot * judged_factor(each.high, confidence) <= limit]
        if not plan:
            no_plan += 1
            continue
        pick = max(plan, key=lambda each: each.said_rate)
        misses = pick.tpot > _MISSED * limit
        missed += misses
        losses.append(1.0 if misses else max(0.0, 1 - pick.rate / best))
    return Choices(losses, missed, no_plan)


def table_of(groups: Sequence[Sequence[Point]]) -> str:
    """The table of the manual: for each level of confidence what is lost, missed and not planned, by limit."""
    limits = " / ".join(f"{1e3 * limit:.0f}" for limit in LIMITS)
    lines = [
        f"| `--confidence` | tokens lost at {limits} ms | choices that miss the limit | sweeps without a choice |",
        "|---|---|---|---|",
    ]
    for confidence in LEVELS:
        each = [choices(groups, limit, confidence) for limit in LIMITS]
        lost = " / ".join(f"{100 * mean(one.losses):.0f}" if one.losses else "-" for one in each)
        missed = " / ".join(f"{100 * one.missed / len(one.losses):.1f}" if one.losses else "-" for one in each)
        none = " / ".join(str(one.no_plan) for one in each)
        lines.append(f"| {confidence} | {lost} % | {missed} % | {none} |")
    return "\n".join(lines)


def ratios(points: Iterable[Point], limit: float) -> list[tuple[float, float]]:
    """For each two devices, the measured and the predicted ratio of their best tokens within the limit."""
    best: dict[str, list[float]] = {}
    by_gpu = defaultdict[str, list[Point]](list)
    for one in points:
        by_gpu[one.gpu].append(one)
    for gpu, own in by_gpu.items():
        measured = [one.rate for one in own if one.tpot <= limit]
        predicted = [one.said_rate for one in own if one.said_tpot <= limit]
        if measured and predicted:
            best[gpu] = [max(measured), max(predicted)]
    return [(best[a][0] / best[b][0], best[a][1] / best[b][1]) for a, b in combinations(sorted(best), 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--devices", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between the markers in this file")
    options = parser.parse_args()
    names = ("model", "engine", "release", "dtype", "isl", "osl", *(() if options.devices else ("gpu",)))
    groups = defaultdict[tuple[Any, ...], list[Point]](list)
    layouts = defaultdict[tuple[Any, ...], set[str]](set)
    for line in options.points.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        measured_point = point(row)
        if measured_point is not None:
            key = tuple(row[name] for name in names)
            groups[key].append(measured_point)
            layouts[key].add(json.dumps(row["layout"], sort_keys=True))
    if not options.devices:
        table = table_of([points for key, points in groups.items() if len(layouts[key]) > 1])
        print(table)
        if options.write:
            write(options.write, BEGIN, END, table)
        return
    for limit in LIMITS:
        pairs = [pair for points in groups.values() for pair in ratios(points, limit)]
        errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
        wrong = sum((measured > 1) != (predicted > 1) for measured, predicted in pairs)
        text = f"{len(pairs)} pairs of devices, ratio off by {median(errors):.1%} at the median, {mean(errors):.1%}"
        print(f"{1e3 * limit:.0f} ms: {text} on average; pays for the wrong one in {wrong}")


if __name__ == "__main__":
    main()
