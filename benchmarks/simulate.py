"""Measure how long `kvcalc.simulate` takes for 10,000 requests on one core, and how much memory.

    python benchmarks/simulate.py [--requests N]

Requests have 1,000 prompt and 1,000 answer tokens, on Llama-3.1-8B and one h100; also with separate prefill instances,
and on DeepSeek-V3 with eight DP ranks. Each row is a process of its own; the time of `import kvcalc` and of a
simulation with one request is subtracted. Both times are CPU seconds. The goals are 2 seconds and 200 MiB.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from processes import run

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
# A name, the model and the device, more options, the engines, and the loads.
_SPLIT = {"prefill_replicas": 2, "transfer": "infiniband-400g"}
CASES = (
    ("", ("llama-3.1-8b", "h100"), {}, ENGINES, LOADS),
    ("separate prefill", ("llama-3.1-8b", "h100"), _SPLIT, ENGINES[:3], LOADS[1:3]),
    ("8 DP ranks", ("deepseek-v3", "h200x8"), {"data_parallel_size": 8}, ENGINES[:3], LOADS[1:3]),
)
_REPEATS = 3


def measure(on: tuple[str, str], asked: dict[str, object], requests: int) -> tuple[float, float]:
    """The median of the CPU seconds, and the largest peak MiB."""
    call = (
        f"import kvcalc; kvcalc.simulate(*{on!r}, prompt_tokens=1000, answer_tokens=1000, requests={requests}, "
        f"**{asked!r})"
    )
    runs = [run([sys.executable, "-c", call]) for _ in range(_REPEATS)]
    return statistics.median(seconds for seconds, _ in runs), max(memory for _, memory in runs)


def main() -> None:
    """Time every engine and load, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="requests per run (default 10,000)")
    requests = parser.parse_args().requests
    slow = False
    print(f"{'engine':14s} {'load':44s} {'seconds':>8s} {'MiB':>6s}")
    for name, on, more, engines, loads in CASES:
        for engine in engines:
            asked = {"engine": engine, **more}
            start, _ = measure(on, {**asked, "concurrency": 1}, 1)
            for load in loads:
                seconds, memory = measure(on, {**asked, **load}, requests)
                text = " ".join(filter(None, [name, *(f"{option} {value:g}" for option, value in load.items())]))
                slow |= seconds - start > GOAL_SECONDS or memory > GOAL_MIB
                print(f"{engine:14s} {text:44s} {seconds - start:8.2f} {memory:6.0f}", flush=True)
    if slow:
        sys.exit(f"over the goal of {GOAL_SECONDS:g} s and {GOAL_MIB} MiB")


if __name__ == "__main__":
    main()
