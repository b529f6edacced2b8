"""Measure how long `kvcalc.simulate` takes for 10,000 requests on one core, and how much memory.

    python benchmarks/speed/simulate.py [--requests N]

Requests have 1,000 prompt and 1,000 answer tokens, on Llama-3.1-8B and one h100; also with separate prefill instances,
and on DeepSeek-V3 with eight DP ranks. The closed loops of benchmarks have lengths that vary by a fifth. Each row is a
process of its own; the time of `import kvcalc` and of a simulation with one request is subtracted. Both times are CPU
seconds. The goals are 2 seconds and 200 MiB. The last column is the time of a request relative to that of the first
row, which says more than seconds on a machine that others use too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.speed.processes import run

GOAL_SECONDS, GOAL_MIB = 2.0, 200
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
# The last two are more than the server can do: requests wait, and the cache is full.
LOADS = (
    {"requests_per_second": 2.0},
    {"requests_per_second": 5.0},
    {"concurrency": 64},
    {"requests_per_second": 20.0},
    {"concurrency": 512},
)


def _lengths(prompt: int, answer: int) -> dict[str, object]:
    """Lengths from 80 % of these to all of them, as InferenceX draws them."""
    return {
        f"{name}_tokens": f"uniform:{most * 4 // 5}..{most}" for name, most in (("prompt", prompt), ("answer", answer))
    }


# A name, the model and the device, more options, the engines, and the loads.
_R1 = "deepseek-r1", "b200x8"
_SPLIT = {"prefill_replicas": 2, "transfer": "infiniband-400g"}
CASES: tuple[tuple[str, tuple[str, str], dict[str, Any], Sequence[str], Sequence[dict[str, Any]]], ...] = (
    ("", ("llama-3.1-8b", "h100"), {}, ENGINES, LOADS),
    ("separate prefill", ("llama-3.1-8b", "h100"), _SPLIT, ENGINES[:3], LOADS[1:3]),
    ("8 DP ranks", ("deepseek-v3", "h200x8"), {"data_parallel_size": 8}, ENGINES[:3], LOADS[1:3]),
    ("1k + 1k", ("llama-3.1-8b", "h100"), _lengths(1024, 1024), ENGINES[:3], LOADS[2:3]),
    ("8k + 1k", ("llama-3.1-8b", "h100"), _lengths(8192, 1024), ENGINES[:1], ({"concurrency": 256},)),
    ("1k + 8k", _R1, {"tensor_parallel_size": 8, **_lengths(1024, 8192)}, ENGINES[1:2], LOADS[2:3]),
    ("1k + 8k, 8 DP ranks", _R1, {"data_parallel_size": 8, **_lengths(1024, 8192)}, ENGINES[1:2], LOADS[2:3]),
)
_REPEATS = 3


def measure(on: tuple[str, str], asked: dict[str, object], requests: int) -> tuple[float, float]:
    """The median of the CPU seconds, and the largest peak MiB."""
    asked = {"prompt_tokens": 1000, "answer_tokens": 1000, "requests": requests, **asked}
    call = f"import kvcalc; kvcalc.simulate(*{on!r}, **{asked!r})"
    runs = [run([sys.executable, "-c", call]) for _ in range(_REPEATS)]
    return statistics.median(seconds for seconds, _ in runs), max(memory for _, memory in runs)


def main() -> None:
    """Time every engine and load, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests per run (default 10,000)")
    requests = parser.parse_args().requests
    slow, first = False, 0.0
    print(f"{'engine':14s} {'load':44s} {'seconds':>8s} {'MiB':>6s} {'ratio':>6s}")
    for name, on, more, engines, loads in CASES:
        for engine in engines:
            asked = {"engine": engine, **more}
            start, _ = measure(on, {**asked, "concurrency": 1}, 1)
            for load in loads:
                seconds, memory = measure(on, {**asked, **load}, requests)
                text = " ".join(filter(None, [name, *(f"{option} {value:g}" for option, value in load.items())]))
                slow |= seconds - start > GOAL_SECONDS or memory > GOAL_MIB
                first = first or seconds - start
                row = f"{seconds - start:8.2f} {memory:6.0f} {(seconds - start) / first:6.2f}"
                print(f"{engine:14s} {text:44s} {row}", flush=True)
    if slow:
        sys.exit(f"over the goal of {GOAL_SECONDS:g} s and {GOAL_MIB} MiB")


if __name__ == "__main__":
    main()
