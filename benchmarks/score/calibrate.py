"""How much do a few results of a server improve the prediction of its others?

    python benchmarks/score/calibrate.py POINTS.jsonl [--runs 1 3 5] [--seeds 3] [--carry | --halves] [--set silicon]

A line of the file has a `question` (a line of `kvcalc batch`), the `metric` measured and its `seconds`, and the
`family`, `device`, `engine` and `version` it belongs to. For every group of one family, device, engine, version, split
and type of weights, some loads calibrate, chosen at random, and the others are predicted. With --carry, the loads of
other families on the same device and engine calibrate instead. With --halves, every second load calibrates, or the
first half of them, in the order of their lengths and clients; groups have at least 8 loads then.

Prints the mean error before and after, the share of points in the range, and the range's width.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
from statistics import mean, median
from typing import Any

from kvcalc.model.layout import LayoutAsked
from kvcalc.model.resolve import load_model
from kvcalc.planning.answers.throughput import describe_throughput
from kvcalc.planning.calibration import Calibration
from kvcalc.planning.calibration.fitted_runs import Run
from kvcalc.planning.calibration.measured import Given, case_of_run, predicted_seconds
from kvcalc.throughput.bench_results.point import Measured, Point
from kvcalc.throughput.hardware import find_devices

_LEAST_LOADS, _MOST_LOADS = 8, 32
_METRICS = {"tpot": "tpot", "ttft": "ttft", "decode_step": "decode"}
_MODELS: dict[str, Any] = {}
Row = tuple[float, float, bool | None, bool | None, float | None, float | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points")
    parser.add_argument("--runs", type=int, nargs="*", default=[1, 3, 5])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set")
    parser.add_argument("--most", type=int, default=12, help="points predicted in a group")
    parser.add_argument("--carry", action="store_true")
    parser.add_argument("--halves", action="store_true")
    given = parser.parse_args()
    groups = _groups(given.points, given.set)
    if given.halves:
        _print_halves(list(groups.values()), given.most)
        return
    for runs in given.runs:
        found: dict[str, dict[Any, list[Row]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        for seed in range(given.seeds):
            for key, loads in groups.items():
                chooser = random.Random(f"{seed} {key}")
                pool = loads
                if given.carry:
                    pool = [x for k, v in groups.items() if k[0] != key[0] and k[1:3] == key[1:3] for x in v]
                if len(pool) < runs + (0 if given.carry else 3):
                    continue
                used = chooser.sample(pool, runs)
                asked = [load for load in loads if load not in used]
                for metric, row in _scored(used, chooser.sample(asked, min(len(asked), given.most))):
                    found[metric][key].append(row)
        for metric, by_group in found.items():
            print(f"{runs} runs, {metric:7}", _line(list(by_group.values())))


def _print_halves(groups: list[list[Any]], most: int) -> None:
    """Print the errors of one half of each group's loads with the other half as measurements."""
    names = "input_tokens", "output_tokens", "concurrency"
    for title, begin, step in (("every second load", 1, 2), ("the first half", None, 1)):
        found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        for loads in groups:
            if len(loads) < _LEAST_LOADS:
                continue
            order = sorted(loads, key=lambda load: [load[0]["question"].get(name, 0) for name in names])
            order = order[:: len(order) // _MOST_LOADS + 1]
            first = len(order) // 2 if begin is None else begin
            asked = order[first::step]
            used = [load for load in order if load not in asked]
            for metric, row in _scored(used, asked[:most]):
                found[metric].append((row[0], row[1]))
        for metric, rows in found.items():
            text = (
                f"median {median(errors):.1%}, within 5 % {mean(e <= 0.05 for e in errors):.0%}, within 10 %"
                f" {mean(e <= 0.1 for e in errors):.0%}" for errors in zip(*rows)
            )  # fmt: skip
            print(f"{title}, {metric:7} {len(rows):5} times: {' -> '.join(text)}")


def _line(groups: list[list[Row]]) -> str:
    columns: list[tuple[Any, ...]] = list(zip(*(row for rows in groups for row in rows)))
    text = f"{len(groups):3} groups, {len(columns[0]):5} times: "
    for name, k in (("mean", 0), ("calibrated", 1)):
        middle = median(mean(float(row[k] or 0) for row in rows) for rows in groups)
        text += f"{name} {mean(columns[k]):.1%}, median group {middle:.1%}; "
    for name, inside, width in (("in range", 2, 4), ("calibrated", 3, 5)):
        known = [value for value in columns[inside] if value is not None]
        if known:
            wide = median(value for value in columns[width] if value is not None)
            text += f"{name} {mean(map(float, known)):.0%} of x{wide:.2f}; "
    return text


def _groups(path: str, only: str | None) -> dict[Any, list[Any]]:
    found: dict[Any, dict[str, list[Any]]] = collections.defaultdict(dict)
    with open(path, encoding="utf-8") as file:
        for line in file:
            point = json.loads(line)
            asked = point["question"]
            # A measured step of a benchmark is that of one sequence.
            if point.get("suspect") or only not in (None, point["set"]) or asked.get("batch", 1) > 1:
                continue
            key = (*(point[name] for name in ("family", "device", "engine", "version")), asked.get("dtype"))
            key = (*key, asked.get("tp"), asked.get("ep"))
            found[key].setdefault(json.dumps(asked), []).append(point)
    return {key: list(loads.values()) for key, loads in found.items()}


def _point(load: list[Any], number: int) -> tuple[Point, Given]:
    asked = load[0]["question"]
    model = _MODELS.setdefault(asked["model"], load_model(asked["model"]))
    version = load[0]["version"]
    engine = asked["engine"] + (f"@{version}" if version else "")
    size = asked.get("tp") or 1
    served = "input_tokens" in asked
    times = tuple(Measured(_METRICS[point["metric"]], point["seconds"], point["seconds"]) for point in load)
    point = Point(
        "vllm", number, None, None, (asked["model"],), num_devices=size,
        dtype=asked.get("dtype"), layout=LayoutAsked(size, expert_parallel_size=asked.get("ep") or 1),
        input_tokens=asked.get("input_tokens") if served else asked.get("context"),
        output_tokens=asked.get("output_tokens") if served else 0, concurrency=asked.get("concurrency", 1), times=times,
    )  # fmt: skip
    return point, Given(model=model, devices=find_devices(asked["gpu"])._replace(num_devices=size), engine=engine)


def _scored(used: list[list[Any]], asked: list[list[Any]]) -> Any:
    runs = [Run("results", _point(load, i)[0]) for i, load in enumerate(used)]
    calibration = Calibration((), runs)
    for load in asked:
        point, given = _point(load, 0)
        try:
            plain, own = (
                describe_throughput(case_of_run(point, given._replace(calibration=one)), [])
                for one in (None, calibration)
            )
        except Exception as error:  # a question that kvcalc refuses is not scored
            print("refused", error)
            continue
        if plain is None or own is None:
            continue
        for time in point.times:
            measured = time.mean_seconds
            if measured is None:
                continue
            row: list[Any] = []
            for document in (plain, own):
                seconds = predicted_seconds(document, time.metric)
                row += [abs(seconds / measured - 1), *_range(document, time.metric, measured)]
            yield time.metric, (row[0], row[3], row[1], row[4], row[2], row[5])


def _range(document: Any, metric: str, measured: float) -> tuple[bool | None, float | None]:
    part, prefix = (document, "") if metric == "decode" else (document["serving"], f"{metric}_")
    low, high = part[f"{prefix}low_seconds"], part[f"{prefix}high_seconds"]
    return (None, None) if low is None or high is None else (low <= measured <= high, high / low)


if __name__ == "__main__":
    main()
