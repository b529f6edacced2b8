"""Measure the CPU time and the memory of `kvcalc prefix` for a million requests.

    python benchmarks/speed/prefix.py [--requests N]

The trace is made with a fixed seed: conversations of 1 to 8 turns that share a system prompt, in Mooncake's format. A
prompt has 24 blocks in the mean, as in Mooncake's conversation trace. The goal is 60 seconds for a million requests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.speed.processes import run

GOAL_SECONDS = 60
_BLOCK = 512
# Conversations that are open at a time.
_OPEN = 4000


def rows(requests: int, num_distinct: int | None) -> Iterator[str]:
    """The lines of a trace. With `num_distinct`, blocks are drawn again after about this many distinct ones."""
    draw = random.Random(1)
    name = 1
    opened: list[tuple[list[int], int]] = []
    for number in range(requests):
        if len(opened) < _OPEN or draw.random() < 0.25:
            blocks, turns = [0], draw.randint(1, 8)
        else:
            blocks, turns = opened.pop(draw.randrange(len(opened)))
        if num_distinct is not None and name > num_distinct:
            # A prompt that was asked before.
            blocks, turns = opened[draw.randrange(len(opened))]
        else:
            more = min(1 + int(draw.expovariate(1 / 7)), 200)
            blocks = [*blocks, *range(name, name + more)]
            name += more
        if turns > 1 or num_distinct is not None:
            opened.append((blocks, turns - 1))
        row = {
            "timestamp": 10 * number, "input_length": len(blocks) * _BLOCK - draw.randrange(_BLOCK),
            "output_length": 300, "hash_ids": blocks,
        }  # fmt: skip
        yield json.dumps(row) + "\n"


def main() -> None:
    """Time each kind of trace, and print one line per kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the trace (default 1,000,000)")
    requests = parser.parse_args().requests
    model = ("llama-3.1-8b", "--gpu", "h100", "--engine", "vllm")
    kinds: list[tuple[str, int | None, tuple[str, ...]]] = [
        ("all blocks sampled in the end", None, model),
        ("the same, without a model", None, ()),
        ("900,000 distinct blocks, exact", 900_000, model),
    ]
    for kind, num_distinct, words in kinds:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(rows(requests, num_distinct))
            file.flush()
            seconds, mib = run([sys.executable, "-m", "kvcalc", "prefix", file.name, *words])
        print(f"{kind:32} {requests:,} requests: {seconds:.1f} s of CPU (goal {GOAL_SECONDS}), {mib:.0f} MiB")


if __name__ == "__main__":
    main()
