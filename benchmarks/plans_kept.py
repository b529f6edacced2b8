"""Do plans keep their targets when the server that they print is simulated?

    python benchmarks/plans_kept.py [--plans 24] [--seed 11] [--seeds 5]

Each plan is a random one by rate, with a percentile or a mean of TTFT as its target. The layout is simulated with the
limit of running requests in its command and with a router that picks replicas at random, as a Kubernetes Service does,
with `--seeds` other seeds and 20 minutes of requests each (2,000 at least, 30,000 at most). A plan keeps its target if
all runs but one do. Prints the plans that do not, and the counts.
"""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import kvcalc

MODELS = ("llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-120b", "llama-3.3-70b")
DEVICES = ("h100", "h200", "a100-80gb", "b200")
# An engine's option for the limit in its command, and the name of its setting.
LIMITS = {
    "vllm": ("--max-num-seqs", "max-num-seqs"), "sglang": ("--max-running-requests", "max-running-requests"),
    "tensorrt-llm": ("--max_batch_size", "max-batch-size"),
}  # fmt: skip


def drawn(source: random.Random) -> dict[str, Any]:
    """The question of a random plan."""
    return {
        "model": source.choice(MODELS), "gpus": [source.choice(DEVICES)], "engine": source.choice(list(LIMITS)),
        "input_tokens": source.choice((500, 1500, 3000)), "output_tokens": source.choice((120, 300)),
        "requests_per_second": float(source.choice((2, 6, 12, 25))),
        "ttft_percentile": source.choice((None, 90, 95, 99)), "max_ttft_seconds": source.choice((0.5, 1.0, 2.0)),
    }  # fmt: skip


def kept(asked: dict[str, Any], best: Any, command: str, seed: int) -> bool:
    """Whether the layout of a plan keeps its target in one simulation."""
    option, setting = LIMITS[asked["engine"]]
    limit = re.search(rf"{option} (\d+)", command)
    rate, statistic = asked["requests_per_second"], asked["ttft_percentile"]
    found: Any = kvcalc.simulate(
        asked["model"], f"{asked['gpus'][0]}x{best['num_devices']}", engine=asked["engine"],
        prompt_tokens=asked["input_tokens"], answer_tokens=asked["output_tokens"], requests_per_second=rate,
        requests=int(min(max(rate * 1200, 2000), 30_000)), seed=seed, router="random", replicas=best["replicas"],
        tensor_parallel_size=best["tensor_parallel_size"], pipeline_parallel_size=best["pipeline_parallel_size"],
        engine_settings={setting: limit[1]} if limit else None,
    )  # fmt: skip
    (ttft,) = (row for row in found["times"] if row["metric"] == "ttft")
    seconds = ttft["mean_seconds" if statistic is None else f"p{statistic}_seconds"]
    return bool(seconds <= asked["max_ttft_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    source, plans, good, runs = random.Random(given.seed), 0, 0, 0
    while plans < given.plans:
        asked = drawn(source)
        try:
            document: Any = kvcalc.plan(**asked)
        except kvcalc.KvcalcError:
            continue
        if document["best"] is None:
            continue
        plans += 1
        command = document["commands"][0]["command"]
        passed = sum(kept(asked, document["best"], command, 100 + number) for number in range(given.seeds))
        good, runs = good + (passed >= given.seeds - 1), runs + passed
        if passed < given.seeds - 1:
            print(f"{passed} of {given.seeds} runs: {asked}")
    print(f"{good} of {plans} plans keep their target, {runs} of {plans * given.seeds} runs")


if __name__ == "__main__":
    main()
