"""The contents of constants.json: constants, the ranges, what was fitted, and the sources."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fit.fitted import Fitted, Predicted
from benchmarks.fit.parameters import ALL_KINDS, CHECKED, SINCE, before, kinds_of
from benchmarks.fit.rows import FIRST, Row
from kvcalc.throughput.constants import regions

_ENGINES = ("vllm", "sglang", "tensorrt-llm", "logical", "llama.cpp", "mlx")
# The range of a region is between that of its own rows and that of the region around it. With this many families, both
# count the same. One family says nothing about the next one, so a region with one has no range of its own.
_SAME_FAMILIES, _LEAST_FAMILIES = 12, 2
# Each cell (a model family with a type of weights on a device) counts once, as the errors within it are much alike, and
# less if it has fewer rows than this. The range leaves out a share at both ends: then 80 % of the points of a cell are
# in it in the mean, if the range is made without the cell's family too (84 % of times to first token).
_LEAST_ROWS, LEFT_OUT, LEFT_OUT_OF_TTFT = 5, 0.065, 0.08
# Noise between equal points of one release, family, device and type, so no range is narrower.
_FLOOR = 0.09


def describe(rows: Sequence[Row], fitted: Fitted, here: Predicted, out: Predicted) -> dict[str, Any]:
    """The document for constants.json. `here` and `out` are the predictions in sample and with the family left out."""
    engines = {engine: _entry(engine, rows, fitted, here, out) for engine in _ENGINES}
    engines["transformers"] = _assumed(engines["logical"])
    return {
        "provenance": {
            "written_by": "benchmarks/fit/throughput.py",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "method": "most probable constants given priors and the rows; see the script",
            "sources": {
                "silicon": "aiconfigurator 0.12 (Apache-2.0), silicon_sample.csv: one DP rank",
                "inferencex": "InferenceX, published runs of DeepSeek-R1",
                "inferencex p50": "the same: medians of the time to first token",
                "inferencex p99": "the same: the longest time to first token of 99 %",
                "serving runs": "inference-sim/sim-to-real-accuracy-validation: vLLM 0.15.1 at random arrivals",
                "ml-energy": "ML.ENERGY benchmark v3: vLLM 0.11.1",
                "gpt-fast": "meta-pytorch/gpt-fast, README.md, commit 6ecad9b",
                "llama.cpp": "tables of kyuz0, lhl, guruswami-ai and ggml-org",
                "llama.cpp 2024": "XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md, commit aa72e0e",
                "mlx": "tables of guruswami-ai",
                "kernels": "aiconfigurator, commit 095f58a (Apache-2.0), kernel tables",
            },
            "rows": dict(Counter(row.source for row in rows)),
            "suspect": dict(Counter(row.suspect for row in rows if row.suspect)),
        },
        "engines": engines,
    }


def _entry(engine: str, rows: Sequence[Row], fitted: Fitted, here: Predicted, out: Predicted) -> dict[str, Any]:
    mine = [i for i, row in enumerate(rows) if row.engine == engine and row.requests != FIRST]
    entry = _constants(engine, fitted, [])
    entry["fitted"] = _fitted([rows[i] for i in mine])
    ratios = [(rows[i], rows[i].seconds / out[i][0]) for i in mine]
    entry["error"] = (
        {
            "in_sample": errors([here[i][0] / rows[i].seconds for i in mine]),
            "family": errors([1 / ratio for _, ratio in ratios]),
        }
        if mine
        else None
    )
    # Rows that the fit does not trust must not widen the ranges.
    entry["ranges"] = ranges_of([ratio for ratio in ratios if ratio[0].suspect is None])
    first = [
        (row, row.ttft_seconds / predicted)
        for row, predicted in ((rows[i], out[i][1]) for i in mine)
        if row.ttft_seconds and predicted and row.suspect is None and not row.is_cold
    ]
    entry["ttft_ranges"] = ranges_of(first, LEFT_OUT_OF_TTFT) if first else {"": [0.5, 2.0]}
    if engine not in SINCE:
        return entry
    older = _constants(engine, fitted, [before(engine)])
    newest = {**entry, "since": SINCE[engine].release, "source": SINCE[engine].source}
    step = {
        key: _changes(older[key], newest[key]) if key in ("constants", "by_device_kind") else newest[key]
        for key in ("since", "source", "constants", "by_device_kind")
    }
    return {**older, **{key: entry[key] for key in ("fitted", "error", "ranges", "ttft_ranges")}, "steps": [step]}


def _constants(engine: str, fitted: Fitted, labels: list[str]) -> dict[str, Any]:
    """The constants of an engine, and those of each kind of device that differ."""
    common = _round(fitted.values(engine, ["hopper", *labels]))
    each = ((kind, fitted.values(engine, [*kinds_of(kind), *labels])) for kind in ALL_KINDS)
    by_kind = {kind: _changes(common, _round(found)) for kind, found in each}

    def is_like_another(kind: str) -> bool:
        whole = kinds_of(kind)[-1]
        return by_kind[kind] == (by_kind[whole] if whole != kind else {})

    return {"constants": common, "by_device_kind": {k: found for k, found in by_kind.items() if not is_like_another(k)}}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in new.items() if old.get(name) != value}


def _fitted(own: Sequence[Row]) -> dict[str, Any]:
    kinds = Counter(row.kind for row in own)
    return {
        "rows": len(own),
        "sources": sorted({row.source for row in own}),
        "device_kinds": sorted(kinds),
        "checked_device_kinds": sorted(set(CHECKED.get(own[0].engine, ())) - set(kinds)) if own else [],
        "weight_classes": sorted({row.weights for row in own}),
        "largest_batch": int(max((row.running for row in own), default=0)),
        "largest_tensor_parallel_size": max((row.model.layout.tensor_parallel_size for row in own), default=1),
        "has_experts": any(row.model.counts.experts for row in own),
    }


def ranges_of(ratios: Sequence[tuple[Row, float]], left_out: float = LEFT_OUT) -> dict[str, list[float]]:
    """The ends of the range of measured / predicted by region, each at least the noise between equal points."""
    regional: dict[str, list[tuple[Row, float]]] = {}
    for row, ratio in ratios:
        for region in regions(row.kind, row.weights, row.running):
            regional.setdefault(region, []).append((row, ratio))
    ends: dict[str, tuple[float, float]] = {}
    for region, rows in sorted(regional.items()):  # a region comes after the one around it
        cells, families = Counter(cell_of(row) for row, _ in rows), len({row.family for row, _ in rows})
        if region and families < _LEAST_FAMILIES:
            continue
        weighed = sorted((ratio, 1 / max(cells[cell_of(row)], _LEAST_ROWS)) for row, ratio in rows)
        own = _quantile(weighed, left_out), _quantile(weighed, 1 - left_out)
        around, share = ends.get(region.rpartition(" ")[0], own), families / (families + _SAME_FAMILIES)
        low, high = (inner**share * outer ** (1 - share) for inner, outer in zip(own, around))
        ends[region] = low, high
    found = {
        region: [round(min(low, 1 - _FLOOR), 3), round(max(high, 1 + _FLOOR), 3)]
        for region, (low, high) in ends.items()
    }
    return found or {"": [0.7, 1.4]}


def cell_of(row: Row) -> tuple[str, ...]:
    """What measurements that are alike share: collection, engine, device, family and type of weights."""
    return row.source, row.engine, row.model.gpu.name, row.family, row.weights


def _assumed(compiled: dict[str, Any]) -> dict[str, Any]:
    """Assumed constants for Transformers' own loop: those of a compiled loop, plus the launch of every operation.

    There are no published figures for it. Operations that a compiler fuses run one by one, and each takes 5 to 10
    microseconds of host time in PyTorch. Answers always say that this is outside the fit.
    """
    return {
        **compiled,
        "constants": {**compiled["constants"], "kernel_seconds": 3 * 7e-6},
        "by_device_kind": {
            kind: {name: value for name, value in found.items() if name != "kernel_seconds"}
            for kind, found in compiled["by_device_kind"].items()
        },
        "fitted": {
            **compiled["fitted"], "rows": 0, "sources": [], "device_kinds": [], "checked_device_kinds": [],
            "weight_classes": [],
            "largest_batch": 0, "largest_tensor_parallel_size": 1,
        },
        "error": None,
        "ranges": {"": [0.7, 1.4]},
        "ttft_ranges": {"": [0.5, 2.0]},
    }  # fmt: skip


def _round(constants: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {k: float(f"{v:.4g}") for k, v in value.items()} if isinstance(value, dict)
        else value if isinstance(value, int) else float(f"{value:.4g}")
        for name, value in constants.items()
    }  # fmt: skip


def _quantile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """The value below which this share of the weights is. The values have weights."""
    wanted, below = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        below += weight
        if below >= wanted:
            return value
    return ordered[-1][0]


def errors(ratios: Sequence[float]) -> dict[str, float]:
    """The errors of predicted / measured."""
    off = [abs(ratio - 1) for ratio in ratios]
    return {
        "mean": round(statistics.mean(off), 3),
        "median": round(statistics.median(off), 3),
        "within_25_percent": round(sum(e <= 0.25 for e in off) / len(off), 3),
        "bias": round(statistics.median(ratio - 1 for ratio in ratios), 3),
    }
