"""The simulation schedules small cases as the engine's own scheduler does.

Each row of vllm.jsonl is what vLLM 0.33.0's Scheduler did, or its AsyncScheduler where `is_overlapped` is true
(v1/core/sched). They ran on a CPU with vLLM's KVCacheManager, one group of full attention and no model: every step
takes one second and gives a token. With overlap, a step is scheduled when the one before it begins. A row has the
blocks of the pool, the requests ([arrival, prompt tokens, answer tokens]), the names of the blocks that prompts share,
and for each request [start, first token, end, preemptions].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.mixed import MixedReplica
from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Rules
from kvcalc.simulation.times import Chunk, Line

ROWS = Path(__file__).parent / "engine_schedules"


class OneSecond:
    """Every step takes a second."""

    def line(self, batch: int, context: int) -> Line:
        return Line(1.0, 0.0, 2**40)

    def prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return 0.0 if batch else 1.0


def rows_of(engine: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / f"{engine}.jsonl").read_text().splitlines()]


def scheduled(row: dict[str, Any]) -> list[list[float]]:
    """What the simulation does with the requests of a row."""
    page, names = row["block_tokens"], row.get("names") or [()] * len(row["requests"])
    pool = BlockPool(row["blocks"], page, range(10_000))
    prefixes = PrefixCache(pool, page, 1, finds_own=True) if row["caching"] else None
    requests = [Request(n, float(a), p, o, names=tuple(names[n])) for n, (a, p, o) in enumerate(row["requests"])]
    MixedReplica(Rules(**row["rules"]), OneSecond(), pool, Arrivals(requests), prefixes).run()
    return [[r.started or 0.0, r.first_token or 0.0, r.finish or 0.0, r.preemptions] for r in requests]


def test_requests_start_and_end_in_the_steps_in_which_vllm_does_it() -> None:
    rows = rows_of("vllm")
    for place, row in enumerate(rows):
        assert scheduled(row) == row["expected"], f"row {place}"
    overlapped = [row["rules"]["is_overlapped"] for row in rows]
    assert min(sum(overlapped), len(rows) - sum(overlapped)) > 40
    assert sum(any(preemptions for *_, preemptions in row["expected"]) for row in rows) > 60


@pytest.mark.parametrize("change", [{"is_overlapped": False}, {"max_running": 99}])
def test_other_rules_give_other_steps(change: dict[str, Any]) -> None:
    rows = [row for row in rows_of("vllm") if row["rules"]["is_overlapped"]]
    changed = [{**row, "rules": {**row["rules"], **change}} for row in rows]
    assert sum(scheduled(row) != row["expected"] for row in changed) > len(rows) // 3
