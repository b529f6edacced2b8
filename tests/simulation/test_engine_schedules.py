"""The simulation schedules small cases as the engine's own scheduler does.

Each row of engine_schedules is what an engine's scheduler did on a CPU without a model: every step takes one second and
gives a token. With overlap, a step is scheduled when the one before it begins. A row has the blocks of the pool, the
requests ([arrival, prompt tokens, answer tokens]), the names of the blocks that prompts share (`named_tokens` tokens
each), and for each request [start, first token, end, preemptions]. These ran:

- vLLM 0.33.0: Scheduler, or AsyncScheduler where `is_overlapped` is true (v1/core/sched), with its KVCacheManager and
  one group of full attention.
- SGLang 0.5.23: the methods of Scheduler (srt/managers/scheduler.py) from get_next_batch_to_run to the results of a
  batch (SchedulerBatchResultProcessor), with PrefillAdder, ScheduleBatch, UnifiedRadixCache, ReqToTokenPool and the
  allocators of tokens and of pages, in the order of event_loop_normal or, with overlap, event_loop_overlap. Its
  `blocks` are tokens. Where requests are retracted, the radix cache is off: the simulation does not find what is left
  of them. Where prompts share blocks, there is room for all: the tree evicts whole nodes, the simulation blocks.
- TensorRT-LLM at commit 5f480b7: PyCapacityScheduler with GuaranteedNoEvictPolicy, and PyMicroBatchScheduler
  (_torch/pyexecutor/scheduler/scheduler.py) without their parts for LoRA, chunks and reused blocks, with a counter of
  blocks, in the order of PyExecutor's loops.
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
from kvcalc.simulation.prefill_first import PrefillFirstReplica
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Rules
from kvcalc.simulation.times import Chunk, Line

ROWS = Path(__file__).parent / "engine_schedules"
# The fewest rows with and without overlap, and with preemptions.
FEWEST = {"vllm": (40, 60), "sglang": (20, 20), "tensorrt_llm": (20, 0)}


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
    is_sglang = row["engine"] == "sglang"
    units = page if is_sglang else 1
    pool = BlockPool(row["blocks"], page, range(0, 10_000 * units, units))
    named = row.get("named_tokens", page)
    prefixes = PrefixCache(pool, named, pool.units(named), finds_own=not is_sglang, merges=is_sglang)
    requests = [Request(n, float(a), p, o, names=tuple(names[n])) for n, (a, p, o) in enumerate(row["requests"])]
    kind = PrefillFirstReplica if is_sglang else MixedReplica
    rules = Rules(**row["rules"])
    kind(rules, OneSecond(), pool, Arrivals(requests), prefixes if row["caching"] else None).run()
    return [[r.started or 0.0, r.first_token or 0.0, r.finish or 0.0, r.preemptions] for r in requests]


@pytest.mark.parametrize("engine", FEWEST)
def test_requests_start_and_end_in_the_steps_in_which_the_engine_does_it(engine: str) -> None:
    rows = rows_of(engine)
    for place, row in enumerate(rows):
        assert scheduled(row) == row["expected"], f"row {place}"
    of_both, preempting = FEWEST[engine]
    overlapped = sum(row["rules"]["is_overlapped"] for row in rows)
    assert min(overlapped, len(rows) - overlapped) >= of_both
    assert sum(any(preemptions for *_, preemptions in row["expected"]) for row in rows) >= preempting


@pytest.mark.parametrize("engine", FEWEST)
@pytest.mark.parametrize("change", [{"is_overlapped": False}, {"max_running": 1}])
def test_other_rules_give_other_steps(engine: str, change: dict[str, Any]) -> None:
    rows = [row for row in rows_of(engine) if row["rules"]["is_overlapped"]]
    changed = [{**row, "rules": {**row["rules"], **change}} for row in rows]
    assert sum(scheduled(row) != row["expected"] for row in changed) > len(rows) // 3
