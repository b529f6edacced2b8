"""Traces for plans."""

from __future__ import annotations

from pathlib import Path
from random import Random


def write_bursts(path: Path, *, seconds: int, each: int, rates: tuple[int, int]) -> str:
    """Write requests that arrive at two `rates` in turn, for `each` seconds at a time. Returns the path."""
    draw, now = Random(1), 0.0
    rows = ["arrival_seconds,prompt_tokens,answer_tokens"]
    while now < seconds:
        now += draw.expovariate(rates[int(now // each % 2)])
        rows.append(f"{now:.3f},{draw.randint(500, 3000)},{draw.randint(50, 200)}")
    path.write_text("\n".join(rows))
    return str(path)
