"""Score decisions that are made from kvcalc's speeds: between layouts of a device, or between devices.

    python benchmarks/score_decisions.py POINTS.jsonl [--confidence 80]
    python benchmarks/score_decisions.py POINTS.jsonl --devices

A line of POINTS.jsonl is a measured point: `model`, `gpu`, `engine`, `release` and `dtype` (or null), the lengths `isl`
and `osl`, the `layout` (tp, ep, dp), `concurrency` clients that each ask again when they are answered, and the mean
`ttft` and `tpot` in seconds. What decides is the output tokens per second and device within a limit on TPOT.

Layouts: of the points whose judged TPOT is within the limit, the one with the most predicted tokens is deployed. Its
loss is the share of the best measured tokens that it does not reach, or all of them if its TPOT misses the limit by
more than 2 %. Groups in which no layout is judged to meet the limit have no plan and are counted.

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

LIMITS = (0.02, 0.03, 0.05)
_MISSED = 1.02


class Point(NamedTuple):
    """TPOT in seconds and tokens per second and device of a layout: measured, and predicted. `judged` is a TPOT."""

    gpu: str
    tpot: float
    rate: float
    said_tpot: float
    judged: float
    said_rate: float


def point(row: Mapping[str, Any], confidence: int) -> Point | None:
    """A measured row and what kvcalc says about it. None if its speed is not known."""
    layout, release = row["layout"], row["release"] or ""
    tensor, ranks = layout.get("tp", 1), layout.get("dp", 1)
    speed = kvcalc.SpeedQuestion(
        expert_parallel_size=layout.get("ep"), input_tokens=row["isl"], output_tokens=row["osl"],
        concurrency=row["concurrency"], confidence=confidence,
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
        serving["tpot_seconds"], serving["tpot_judged_seconds"], serving["tokens_per_second_per_device"],
    )  # fmt: skip


def loss(points: Sequence[Point], limit: float) -> float | None:
    """The share of the best tokens that the deployed point does not reach. None without a plan.

    ValueError if no measured point is within the limit.
    """
    best = max(one.rate for one in points if one.tpot <= limit)
    plan = [one for one in points if one.judged <= limit]
    if not plan:
        return None
    pick = max(plan, key=lambda one: one.said_rate)
    return 1.0 if pick.tpot > _MISSED * limit else max(0.0, 1 - pick.rate / best)


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
    parser.add_argument("--confidence", type=int, default=80)
    parser.add_argument("--devices", action="store_true")
    options = parser.parse_args()
    names = ("model", "engine", "release", "dtype", "isl", "osl", *(() if options.devices else ("gpu",)))
    groups = defaultdict[tuple[Any, ...], list[Point]](list)
    for line in options.points.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found = point(row, options.confidence)
        if found is not None:
            groups[tuple(row[name] for name in names)].append(found)
    for limit in LIMITS:
        if options.devices:
            pairs = [pair for points in groups.values() for pair in ratios(points, limit)]
            errors = [abs(predicted / measured - 1) for measured, predicted in pairs]
            wrong = sum((measured > 1) != (predicted > 1) for measured, predicted in pairs)
            text = f"{len(pairs)} pairs of devices, ratio off by {median(errors):.1%} at the median, {mean(errors):.1%}"
            print(f"{1e3 * limit:.0f} ms: {text} on average; pays for the wrong one in {wrong}")
            continue
        losses = [loss(points, limit) for points in groups.values() if any(one.tpot <= limit for one in points)]
        plans = [one for one in losses if one is not None]
        print(f"{1e3 * limit:.0f} ms: {len(plans)} plans lose {mean(plans):.1%}; no plan {len(losses) - len(plans)}")


if __name__ == "__main__":
    main()
