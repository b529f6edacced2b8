"""Measure how many full answers per second `kvcalc batch` gives on one core, and how much memory it takes.

    python benchmarks/speed/batch.py [--lines N]

The lines are random models, contexts, batches, types and devices with a fixed seed. The time of a single line is
subtracted, so that the rate does not include start-up. Both times are CPU seconds. The goal is 3,000 per second.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile

from benchmarks.speed.processes import run

GOAL = 3000
# Models that every engine supports.
MODELS = (
    "llama-3-70b llama-3-8b llama-7b deepseek-v3 gpt-oss-120b gemma-3-27b qwen3-30b-a3b mistral-7b-v0.3 qwen3-32b "
    "llama-3.1-8b"
).split()
SERVING: dict[str, object] = {"input_tokens": 2048, "output_tokens": 500, "concurrency": 32}


def questions(count: int, extra: dict[str, object]) -> str:
    """JSON lines. Each has the keys of `extra`. With requests to serve, prompts vary instead of contexts."""
    draw = random.Random(1)
    lines = []
    for _ in range(count):
        question = {
            "model": draw.choice(MODELS),
            "context": draw.randrange(1, 131_072),
            "batch": draw.randrange(1, 65),
            "kv_dtype": draw.choice(["auto", "fp8"]),
            "tp": draw.choice([1, 2, 4]),
        }
        question |= extra
        if "input_tokens" in question:
            question["input_tokens"], question["concurrency"] = question.pop("context"), question.pop("batch")
        lines.append(json.dumps(question))
    return "\n".join(lines) + "\n"


def run_batch(text: str) -> tuple[float, float]:
    """CPU seconds and peak MiB of `kvcalc batch` for these lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(text)
        file.flush()
        return run([sys.executable, "-m", "kvcalc", "batch", file.name])


def main() -> None:
    """Time each kind of question, and print one line per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000, help="lines per run (default 20,000)")
    lines = parser.parse_args().lines
    kinds: list[tuple[str, dict[str, object]]] = [
        ("bytes", {}),
        ("bytes, --engine vllm --kv-memory", {"engine": "vllm", "kv_memory": "40GiB"}),
        ("--gpu: bytes, fit, speed", {"gpu": "h100"}),
        ("--gpu --engine vllm: the same", {"gpu": "h100", "engine": "vllm"}),
        ("--gpu --engine vllm, serving", {"gpu": "h100", "engine": "vllm", **SERVING}),
        ("--gpu --engine sglang, serving", {"gpu": "h100", "engine": "sglang", **SERVING}),
    ]  # fmt: skip
    for title, extra in kinds:
        start, _ = run_batch(questions(1, extra))
        seconds, mib = run_batch(questions(lines, extra))
        rate = (lines - 1) / (seconds - start)
        met = "met" if rate >= GOAL else "missed"
        print(f"{title}: {rate:,.0f} answers per second (goal {GOAL:,}: {met}), {mib:.0f} MiB")


if __name__ == "__main__":
    main()
