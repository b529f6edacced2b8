"""Do a plan by clients, and one by the rate that they make, need the same devices?

    python benchmarks/score/plan_by_rate.py [--plans 100] [--skip N] [--percentile 99] [--confidence 50]

Loads are drawn at random: a model, a kind of device, an engine, lengths, clients, and limits on TPOT and TTFT. The rate
is the one that the plan by clients prints, at the speed at which it is judged: that is what these clients send. Prints
each pair that differs, and how many do not.
"""

from __future__ import annotations

import argparse
from random import Random
from typing import Any

import kvcalc

MODELS = (
    "llama-3.1-8b", "qwen3-32b", "llama-3-70b", "gpt-oss-120b", "qwen3-30b-a3b", "mistral-small-24b", "gemma-3-27b",
    "deepseek-v3", "qwen3-235b-a22b", "gpt-oss-20b",
)  # fmt: skip
DEVICES = ("h100", "h200", "a100-80gb", "l40s", "b200", "mi300x")


def drawn(number: int) -> tuple[dict[str, Any], int]:
    """The question of a plan without its load, and the clients."""
    source = Random(number)
    asked = {
        "model": source.choice(MODELS), "gpus": [source.choice(DEVICES)],
        "engine": source.choice(("vllm", "vllm", "sglang")),
        "input_tokens": int(200 * 2 ** source.uniform(0, 5)), "output_tokens": int(50 * 2 ** source.uniform(0, 4)),
    }  # fmt: skip
    clients = int(2 ** source.uniform(3, 9))
    limits = {
        "max_tpot_seconds": source.choice((0.02, 0.03, 0.05, 0.1)), "max_ttft_seconds": source.choice((0.5, 1, 2, 5)),
    }  # fmt: skip
    return {**asked, **limits}, clients


def described(row: Any) -> str:
    """A row of a plan as one line."""
    if row is None:
        return "no layout"
    sizes = " x ".join(f"{name} {row[f'{key}_parallel_size']}" for name, key in (("tp", "tensor"), ("dp", "data")))
    times = f"TTFT {row['ttft_seconds']:.3f} s, TPOT {row['tpot_seconds'] * 1000:.1f} ms"
    return f"{row['num_devices']} devices, {row['replicas']} x {sizes}, {times}, {row['requests_per_second']:.2f}/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=100)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--percentile", type=int)
    parser.add_argument("--confidence", type=int, default=50)
    given = parser.parse_args()
    more = {"confidence": given.confidence, "ttft_percentile": given.percentile}
    pairs: list[tuple[int, int]] = []
    for number in range(given.skip, given.skip + given.plans):
        asked, clients = drawn(number)
        try:
            first: Any = kvcalc.plan(**asked, **more, concurrency=clients)["best"]
            if first is None:
                continue
            rate = first["requests_per_second"] * first["tpot_seconds"] / first["tpot_judged_seconds"]
            second: Any = kvcalc.plan(**asked, **more, requests_per_second=rate)["best"]
        except kvcalc.KvcalcError:
            continue
        pairs.append((first["num_devices"], second["num_devices"] if second else 0))
        if pairs[-1][0] != pairs[-1][1]:
            print(f"{number} {asked} {clients} clients\n  {described(first)}\n  {described(second)}", flush=True)
    same = sum(a == b for a, b in pairs)
    close = sum(abs(a - b) <= 0.15 * a for a, b in pairs)
    print(f"{len(pairs)} pairs: {same} with the same devices, {close} within 15 %")


main()
