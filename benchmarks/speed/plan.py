"""Measure the CPU time of `kvcalc.plan` on one core: the default search, all layouts, and percentiles.

    python benchmarks/speed/plan.py

Requests have 2,048 prompt and 500 answer tokens, and there are 20 a second. Each row is a process of its own; the time
of importing kvcalc and reading the model is subtracted. Layouts are those that the rule gives, on all kinds of device.
The goal is 5 seconds for all layouts. Without arguments, every search is timed three times and the median is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import kvcalc
from benchmarks.speed.processes import run
from kvcalc.planning.plan.shapes import all_shapes, usual_shapes
from kvcalc.question.question import Question
from kvcalc.throughput.hardware import find_gpu

GOAL_SECONDS = 5.0
MODELS = ("llama-3.1-8b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3")
DEVICES = (("h100",), ("h100", "b200", "mi300x", "gb200"))
# The name of a search, its options, and whether the goal is for it.
SEARCHES = (
    ("default", "", False),
    ("--all-layouts", ", all_layouts=True", True),
    ("--max-tpot 30ms --all-layouts", ", max_tpot_seconds=0.03, all_layouts=True", True),
    ("--all-layouts, vllm and sglang", ", all_layouts=True, engines=('vllm', 'sglang')", True),
    ("--max-tpot 30ms@p90", ", max_tpot_seconds=0.03, tpot_percentile=90", False),
)


def seconds_of(model: str, devices: tuple[str, ...], options: str, repeats: int) -> float:
    """The median of the CPU seconds of one plan."""
    modules = "kvcalc.api.serving, kvcalc.planning.plan.document, kvcalc.planning.plan.planned"
    start = f"import {modules}; kvcalc.load_model({model!r})"
    ask = (
        f"{start}; kvcalc.plan({model!r}, {devices!r}, input_tokens=2048, output_tokens=500, requests_per_second=20.0"
        f"{options})"
    )
    found, empty = (
        statistics.median(run([sys.executable, "-c", code])[0] for _ in range(repeats)) for code in (ask, start)
    )
    return found - empty


def count_layouts(model: str, devices: tuple[str, ...], options: str) -> int:
    """The layouts of one replica that a search may try."""
    question, gpus = Question(kvcalc.load_model(model)), [find_gpu(name) for name in devices]
    if "all_layouts" in options:
        engines = ("vllm", "sglang") if "engines" in options else ("vllm",)
        return sum(len(all_shapes(gpu, question, engine)) for gpu in gpus for engine in engines)
    return sum(len(shapes) for gpu in gpus for shapes in usual_shapes(gpu, question, "vllm"))


def main() -> None:
    """Time every search, and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each search (default 3)")
    repeats = parser.parse_args().repeats
    is_slow = False
    print(f"{'model':16s} {'kinds':>5s} {'search':30s} {'layouts':>8s} {'seconds':>8s}")
    for model in MODELS:
        for devices in DEVICES:
            for name, options, has_goal in SEARCHES:
                seconds = seconds_of(model, devices, options, repeats)
                layouts = count_layouts(model, devices, options)
                is_slow = is_slow or (has_goal and seconds > GOAL_SECONDS)
                print(f"{model:16s} {len(devices):5d} {name:30s} {layouts:8,d} {seconds:8.2f}", flush=True)
    if is_slow:
        sys.exit(f"over the goal of {GOAL_SECONDS:g} s")


if __name__ == "__main__":
    main()
