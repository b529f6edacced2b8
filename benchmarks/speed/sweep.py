"""Measure a sweep of a million points: CPU seconds and peak memory of the whole process, on one core.

    python benchmarks/speed/sweep.py [--points N]

The bytes columns of three models are written as csv and discarded. The goals are 15 s and 60 MiB. The operating system
counts each figure for one finished process.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.speed.processes import run

GOAL_SECONDS, GOAL_MIB = 15, 60

# A plain model, a model with windows in some layers, and a model with an indexer. SLOW has a model with compressed
# entries, which have no curve.
MODELS = ("llama-3-70b", "gpt-oss-120b", "deepseek-v3.2")
SLOW = ("deepseek-v4-flash",)


def main() -> None:
    """Run the sweeps, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000, help="points per sweep (default 1,000,000)")
    points = parser.parse_args().points
    base = [sys.executable, "-m", "kvcalc", "sweep"]
    grids = [(f"{model}, bytes", [model, "--context", f"1..{points}:1"]) for model in MODELS]
    grids.append(
        (
            "gemma-3-27b, batches, types and devices",
            [
                "gemma-3-27b",
                "--context",
                f"1..{points // 16}:1",
                "--batch",
                "1..8",
                "--kv-dtype",
                "bf16,fp8",
                "--tp",
                "1,2",
            ],
        )
    )
    for model in SLOW:
        grids.append((f"{model}, bytes, a hundredth of the points", [model, "--context", f"1..{points // 100}:1"]))
    grids.append(
        (
            "llama-3-70b, --engine vllm, a hundredth",
            ["llama-3-70b", "--context", f"1..{points // 100}:1", "--engine", "vllm"],
        )
    )
    grids.append(
        (
            "llama-3-70b, --gpu h100: fit and speed, a hundredth of the points",
            ["llama-3-70b", "--context", f"1..{points // 100}:1", "--gpu", "h100", "--tp", "8"],
        )
    )
    for title, options in grids:
        seconds, mib = run([*base, *options, "--format", "csv"])
        goal = "" if "hundredth" in title else f" (goals {GOAL_SECONDS} s, {GOAL_MIB} MiB)"
        print(f"{title}: {seconds:.2f} s CPU, {mib:.0f} MiB{goal}")


if __name__ == "__main__":
    main()
