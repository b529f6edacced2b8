"""Make the two traces of the tutorials: python docs/start/make_traces.py [FOLDER]

`chat.csv`: a chat service at 50 requests a second for 40 seconds. `agents.jsonl`: agents that call tools, in the format
of Mooncake's traces. Both are synthetic, and the same on every machine.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK = 512  # tokens that one of Mooncake's ids stands for


def lognormal(draw: random.Random, mean: float, deviation: float, most: int) -> int:
    """Whole tokens with this mean, and a standard deviation of `deviation` times the mean, cut at `most`."""
    sigma = math.sqrt(math.log1p(deviation**2))
    return min(most, max(8, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def chat(seconds: float = 40, rate: float = 50) -> Iterator[str]:
    """Rows of CSV: requests that arrive at random, with prompts of about 900 tokens and answers of about 250."""
    draw = random.Random(50)  # noqa: S311 - not for secrets
    yield "arrival_seconds,prompt_tokens,answer_tokens"
    now = draw.expovariate(rate)
    while now < seconds:
        yield f"{now:.3f},{lognormal(draw, 900, 1, 7000)},{lognormal(draw, 250, 0.8, 1000)}"
        now += draw.expovariate(rate)


def agents(sessions: int = 30, hours: float = 0.5) -> Iterator[str]:
    """JSON lines: all sessions start with the same tokens, and a step's prompt holds all steps before it."""
    draw = random.Random(32)  # noqa: S311 - not for secrets
    rows = []
    shared = range(12)  # 6,144 tokens: the system prompt, and what the tools do
    fresh = 12
    for _ in range(sessions):
        now, tokens, blocks = draw.uniform(0, 3600 * hours), len(shared) * BLOCK, list(shared)
        for _step in range(draw.randint(3, 9)):
            tokens += lognormal(draw, 6000, 0.8, 20000)  # what a tool returned: files, pages, logs
            while len(blocks) < tokens // BLOCK:
                blocks.append(fresh)
                fresh += 1
            answer = lognormal(draw, 400, 0.7, 2000)
            rows.append((now, tokens, answer, list(blocks)))
            now += draw.expovariate(1 / 40)
            tokens += answer
    for at, tokens, answer, blocks in sorted(rows):
        row = {"timestamp": round(at * 1000), "input_length": tokens, "output_length": answer, "hash_ids": blocks}
        yield json.dumps(row, separators=(",", ":"))


def main() -> None:
    """Write both files into a folder, by default the one of this script."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "chat.csv").write_text("\n".join(chat()) + "\n")
    (folder / "agents.jsonl").write_text("\n".join(agents()) + "\n")


if __name__ == "__main__":
    main()
