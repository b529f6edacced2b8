"""Fit kvcalc/throughput/constants.json to published measurements, and say how well rows left out are predicted.

    python benchmarks/fit_throughput.py --data FOLDER [--dry-run]

The servers (vLLM, SGLang, TensorRT-LLM) and the compiled loop `logical` stands for are fitted together: the hardware's
part is common to them, what an engine adds of its own is drawn towards the others where its rows are few. llama.cpp has
kernels of its own, and differs by kind of device. No constant belongs to a model, and no row has one of its own.

Left out are a whole model family (all its sources at once) and a whole device; the range an answer carries is the
10th to 90th percentile of measured / predicted of such rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from map_fit import fit
from throughput_data import Row, counts_of, data_folder, predict, predict_ttft, read_rows

from kvcalc.throughput.constants import Constants, weight_class

TARGET = Path(__file__).resolve().parent.parent / "kvcalc" / "throughput" / "constants.json"
SERVERS = ("vllm", "sglang", "tensorrt-llm", "logical")
KINDS = ("ada", "ampere", "ampere-hbm", "apple-m", "blackwell-rtx", "rdna3.5", "rdna4", "turing")


class Parameter(NamedTuple):
    """The prior of a constant: its likely value, the spread of its logarithm, and that of an engine's (or a kind of
    device's) own deviation from it. With `floor` 1 the value is 1 plus what is fitted: no faster than ideal."""

    name: str
    likely: float
    spread: float
    deviation: float = 0.0
    floor: float = 0.0


# What is likely is what such kernels are known for: copies reach about 80 % of a memory's nominal bandwidth, large
# multiplications 60 to 70 % of nominal FLOP/s, an all-reduce costs some microseconds, a launch in a graph 1 to 2.
_SERVER_PARAMETERS = (
    *(Parameter(f"weight_overhead.{kind}", 0.2, 0.5, floor=1) for kind in ("bf16", "fp8", "nvfp4", "int8", "int4")),
    Parameter("expert_overhead", 0.3, 0.5, 0.3, floor=1),
    Parameter("kv_overhead", 0.35, 0.5, 0.35, floor=1),
    Parameter("compute_overhead", 0.5, 0.4, floor=1),
    Parameter("expert_compute_overhead", 0.5, 0.4, floor=1),
    Parameter("attention_compute_overhead", 1.0, 0.4, floor=1),
    Parameter("roof_power", 1.0, 0.3, floor=1),
    Parameter("layer_seconds", 20e-6, 0.7, 0.35),
    Parameter("moe_layer_seconds", 50e-6, 0.5, 0.2),
    Parameter("expert_seconds", 1e-7, 1.0),
    Parameter("step_seconds", 1.5e-3, 0.7, 0.35),
    Parameter("sequence_seconds", 2e-5, 0.7, 0.35),
    Parameter("activation_passes", 15, 0.7),
    Parameter("all_reduce_seconds", 4e-6, 0.5),
    Parameter("all_reduce_power", 0.5, 0.3),
    Parameter("link_overhead", 0.7, 0.4, floor=1),
    Parameter("prefill_overhead", 0.6, 0.4, 0.15, floor=1),
    Parameter("prefill_expert_overhead", 1.0, 0.5, floor=1),
    Parameter("prefill_attention_overhead", 2.0, 0.4, floor=1),
    # SGLang's scheduler runs waiting prompts before it decodes again: what others wait for comes before their first
    # token. The other servers mix both in a step.
    Parameter("prefill_interference@sglang", 0.5, 0.15),
)
_LLAMA_CPP_PARAMETERS = (
    Parameter("weight_overhead.bf16", 0.2, 0.5, 0.4, floor=1),
    Parameter("weight_overhead.int4", 0.3, 0.5, 0.4, floor=1),
    Parameter("kv_overhead", 0.6, 0.6, floor=1),
    Parameter("kv_token_seconds", 3e-9, 1.5),
    Parameter("layer_seconds", 20e-6, 0.7, 0.4),
    Parameter("step_seconds", 1e-3, 0.7),
    Parameter("stage_seconds", 1e-4, 1.0),
)
_TTFT_PARAMETERS = (
    Parameter("ttft_seconds", 0.03, 1.0, 0.7),
    Parameter("ttft_steps", 1.0, 0.7, 0.7),
    Parameter("ttft_queue", 0.05, 1.0, 1.0),
)
# A compiled loop on one process has fewer host costs than a server; how many fewer its own rows say.
_LOOSE = {("layer_seconds", "logical"), ("step_seconds", "logical")}
_FIXED = {
    "stage_seconds": 2e-5, "kv_token_seconds": 0.0, "prefill_interference": 1.0, "ttft_seconds": 0.0, "ttft_steps": 0.0,
    "ttft_queue": 0.0,
}  # fmt: skip
# The most sequences at once by default: max_num_seqs of vLLM's server (0.33, on large devices), max_batch_size of
# TensorRT-LLM 1.0; SGLang and the others bound it by memory alone.
_MAX_SEQUENCES = {"vllm": 1024, "tensorrt-llm": 2048, "sglang": 4096, "logical": 4096, "llama.cpp": 256}


class Space(NamedTuple):
    """The thetas of a fit: their names (`constant` or `constant@group`), priors and floors."""

    names: list[str]
    prior: list[tuple[float, float]]
    floors: dict[str, float]
    groups: tuple[str, ...]
    group_of: Callable[[Row], str]


def space(parameters: Iterable[Parameter], groups: tuple[str, ...], group_of: Callable[[Row], str]) -> Space:
    names, prior, floors = [], [], {}
    for one in parameters:
        names.append(one.name)
        prior.append((math.log(one.likely), one.spread))
        floors[one.name.split("@")[0]] = one.floor
        if one.deviation:
            for group in groups:
                names.append(f"{one.name}@{group}")
                prior.append((0.0, 0.8 if (one.name, group) in _LOOSE else one.deviation))
    return Space(names, prior, floors, groups, group_of)


def values(where: Space, theta: Sequence[float], group: str, base: dict[str, Any]) -> dict[str, Any]:
    """The constants of one group of rows."""
    own: dict[str, float] = {}
    for name, value in zip(where.names, theta):
        constant, _, of = name.partition("@")
        if of in ("", group):
            own[constant] = own.get(constant, 0.0) + value
    found = {**base, "weight_overhead": dict(base.get("weight_overhead", {}))}
    for name, total in own.items():
        value = where.floors[name] + math.exp(total)
        if name.startswith("weight_overhead."):
            found["weight_overhead"][name.partition(".")[2]] = value
        else:
            found[name] = value
    return found


def run(
    where: Space,
    rows: Sequence[Row],
    base: Callable[[str], dict[str, Any]],
    ask: Callable[[Row, Constants], float],
    measured: Sequence[float],
    start: Sequence[float] | None = None,
) -> list[float]:
    """Theta fitted to the rows."""

    def logs_of(theta: list[float], which: Sequence[int]) -> list[float]:
        constants = {g: Constants(**values(where, theta, g, base(g))) for g in where.groups}
        return [math.log(ask(rows[i], constants[where.group_of(rows[i])])) for i in which]

    everything = range(len(rows))
    touches = []
    for name in where.names:
        constant, _, group = name.partition("@")
        stored = constant.partition(".")[2]
        touches.append(
            [
                i
                for i in everything
                if (not group or where.group_of(rows[i]) == group)
                # The output head is read in 16 bits whatever the rest is stored in.
                and (not stored or stored in ("bf16", weight_class(rows[i].dtype)))
            ]
        )
    return fit(
        start or [mean for mean, _ in where.prior], where.prior, lambda theta: logs_of(theta, everything), touches,
        logs_of, [math.log(m) for m in measured], weights_of(rows),
    )  # fmt: skip


def weights_of(rows: Sequence[Row]) -> list[float]:
    """Families count alike whatever their number of rows; published maxima half as much, a loop's table more."""
    many = Counter((row.source, row.family) for row in rows)
    factor = {"serving": 1.0, "maximum": 0.5, "gpt-fast": 0.8, "llama.cpp": 1.0, "ollama": 0.7}
    least = 1e-3
    return [
        least if row.is_drafting else min(1.0, math.sqrt(60 / many[row.source, row.family])) * factor[row.source]
        if row.source != "gpt-fast" else 2.5 * factor[row.source]
        for row in rows
    ]  # fmt: skip


def servers() -> Space:
    return space(_SERVER_PARAMETERS, SERVERS, lambda row: row.engine)


def llama_cpp() -> Space:
    return space(_LLAMA_CPP_PARAMETERS, KINDS, lambda row: row.kind)


def server_base(engine: str) -> dict[str, Any]:
    return {**_FIXED, "max_sequences": _MAX_SEQUENCES[engine]}


class Fitted(NamedTuple):
    """Both fits, as constants by engine and, for llama.cpp, by kind of device."""

    constants: dict[tuple[str, str], Constants]
    thetas: tuple[list[float], list[float]]

    def of(self, row: Row) -> Constants:
        kind = row.kind if row.engine == "llama.cpp" else ""
        return self.constants.get((row.engine, kind)) or self.constants[row.engine, ""]

    def seconds(self, row: Row) -> float:
        return predict(row, self.of(row))


def fit_all(rows: Sequence[Row], start: tuple[list[float], list[float]] | None = None) -> Fitted:
    """All constants but those of TTFT."""
    one = [row for row in rows if row.engine != "llama.cpp"]
    where = servers()
    theta = run(where, one, server_base, predict, [row.seconds for row in one], start and start[0])
    constants = {(e, ""): Constants(**values(where, theta, e, server_base(e))) for e in SERVERS}
    two = [row for row in rows if row.engine == "llama.cpp"]
    # What llama.cpp's rows, all of batch 1, say nothing of is taken as common to all.
    common = values(where, theta, "", server_base("logical"))
    base = {**common, "max_sequences": _MAX_SEQUENCES["llama.cpp"]}
    there = llama_cpp()
    theta2 = run(there, two, lambda kind: base, predict, [row.seconds for row in two], start and start[1])
    for kind in ("", *KINDS):
        constants["llama.cpp", kind] = Constants(**values(there, theta2, kind, base))
    return Fitted(constants, (theta, theta2))


def fit_ttft(rows: Sequence[Row], fitted: Fitted) -> dict[str, dict[str, float]]:
    """The constants of the time to first token, by engine, all others given."""
    engines = SERVERS[:3]
    where = space(_TTFT_PARAMETERS, engines, lambda row: row.engine)
    serving = [row for row in rows if row.ttft_seconds and not row.is_drafting]
    measured = [row.ttft_seconds or 0.0 for row in serving]
    theta = run(where, serving, lambda e: fitted.constants[e or "vllm", ""]._asdict(), predict_ttft, measured)
    names = [one.name for one in _TTFT_PARAMETERS]
    return {e: {n: values(where, theta, e, {})[n] for n in names} for e in ("", *engines)}


def left_out(rows: Sequence[Row], key: Callable[[Row], str], start: Fitted) -> list[float]:
    """Each row's seconds by constants fitted without any row of its `key`."""
    found = [0.0] * len(rows)
    for value in sorted({key(row) for row in rows}):
        kept = fit_all([row for row in rows if key(row) != value], start.thetas)
        for i, row in enumerate(rows):
            if key(row) == value:
                found[i] = kept.seconds(row)
        print(f"  without {value}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--dry-run", action="store_true", help="fit and print, write nothing, leave nothing out")
    options = parser.parse_args()
    rows = read_rows(data_folder(options.data))
    fitted = fit_all(rows)
    for (engine, kind), constants in fitted.constants.items():
        print(
            engine, kind, {k: v if isinstance(v, dict) else float(f"{v:.3g}") for k, v in constants._asdict().items()}
        )
    ttft = fit_ttft(rows, fitted)
    print("ttft", ttft)
    here = [fitted.seconds(row) for row in rows]
    for source in dict.fromkeys(row.source for row in rows):
        errors = [abs(h / r.seconds - 1) for h, r in zip(here, rows) if r.source == source]
        print(source, len(errors), f"mean {statistics.mean(errors):.3f} median {statistics.median(errors):.3f}")
    if options.dry_run:
        return
    out = {"family": left_out(rows, lambda r: r.family, fitted), "device": left_out(rows, lambda r: r.gpu.name, fitted)}
    document = describe(rows, fitted, ttft, here, out)
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")


def describe(
    rows: Sequence[Row],
    fitted: Fitted,
    ttft: dict[str, dict[str, float]],
    here: list[float],
    out: dict[str, list[float]],
) -> dict[str, Any]:
    """constants.json."""
    engines: dict[str, Any] = {}
    for engine in (*SERVERS, "llama.cpp"):
        mine = [i for i, row in enumerate(rows) if row.engine == engine and not row.is_drafting]
        own = [rows[i] for i in mine]
        ratios = {
            name: sorted(rows[i].seconds / found[i] for i in mine)
            for name, found in (("in_sample", here), *out.items())
        }
        spread = [(_quantile(r, 0.1), _quantile(r, 0.9)) for name, r in ratios.items() if name != "in_sample"]
        entry: dict[str, Any] = {
            "constants": _round({**fitted.constants[engine, ""]._asdict(), **ttft.get(engine, ttft[""])}),
            "fitted": {
                "rows": len(own),
                "sources": sorted({row.source for row in own}),
                "device_kinds": sorted({row.kind for row in own}),
                "weight_classes": sorted({weight_class(row.dtype) for row in own}),
                "largest_batch": max(2048 if row.concurrency is None else row.concurrency for row in own),
                "largest_tensor_parallel_size": max(row.layout.tensor_parallel_size for row in own),
                "has_experts": any(counts_of(row.model, row.dtype, row.layout, row.engine).experts for row in own),
            },
            "error": {name: _errors(r) for name, r in ratios.items()},
            "range": [round(min(low for low, _ in spread), 3), round(max(high for _, high in spread), 3)],
        }
        if engine == "llama.cpp":
            common = entry["constants"]
            entry["by_device_kind"] = {
                kind: {
                    name: value
                    for name, value in _round(fitted.constants[engine, kind]._asdict()).items()
                    if value != common[name] and not name.startswith("ttft")
                }
                for kind in KINDS
            }
        engines[engine] = entry
    engines["transformers"] = _assumed(engines["logical"])
    return {
        "provenance": {
            "written_by": "benchmarks/fit_throughput.py",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "method": "most probable constants given priors and the rows; see the script",
            "sources": {
                "serving": "aiconfigurator 0.12 (Apache-2.0), silicon_sample.csv: five models, one attention replica",
                "maximum": "TensorRT-LLM 0.17 and 1.0, docs/source/performance/perf-overview.md",
                "gpt-fast": "meta-pytorch/gpt-fast, README.md, commit 6ecad9b",
                "ollama": "geerlingguy/ai-benchmarks, README.md, commit bdf9441: whole computers",
                "llama.cpp": "XiongjieDai/GPU-Benchmarks-on-LLM-Inference, README.md, commit aa72e0e",
            },
            "rows": dict(Counter(row.source for row in rows)),
        },
        "engines": engines,
    }  # fmt: skip


def _assumed(compiled: dict[str, Any]) -> dict[str, Any]:
    """Transformers' own loop, of which there are no figures: a compiled loop's, and a launch for every operation.

    A decoder layer runs some 50 operations one by one (norms, rotary embedding, repeats, masks), and PyTorch takes 5 to
    10 microseconds of the host for each. Always said to be outside the fit.
    """
    return {
        **compiled,
        "constants": {**compiled["constants"], "layer_seconds": 50 * 7e-6},
        "fitted": {
            **compiled["fitted"], "rows": 0, "sources": [], "device_kinds": [], "weight_classes": [],
            "largest_batch": 0, "largest_tensor_parallel_size": 1,
        },
        "error": None,
        "range": [0.7, 1.4],
    }  # fmt: skip


def _round(constants: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {k: float(f"{v:.4g}") for k, v in value.items()} if isinstance(value, dict)
        else value if isinstance(value, int) else float(f"{value:.4g}")
        for name, value in constants.items()
    }  # fmt: skip


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _errors(ratios: Sequence[float]) -> dict[str, float]:
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return {
        "mean": round(statistics.mean(errors), 3),
        "median": round(statistics.median(errors), 3),
        "within_25_percent": round(sum(e <= 0.25 for e in errors) / len(errors), 3),
        "bias": round(statistics.median(1 / ratio - 1 for ratio in ratios), 3),
    }


if __name__ == "__main__":
    main()
