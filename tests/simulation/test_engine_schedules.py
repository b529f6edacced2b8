"""The simulation schedules small cases as the engine's own scheduler does.

Each row of engine_schedules is what an engine's scheduler did on a CPU without a model: every step takes one second and
gives a token. With overlap, a step is scheduled when the one before it begins. A row has the blocks of the pool, the
requests ([arrival, prompt tokens, answer tokens]), the names of the blocks that prompts share (`named_tokens` tokens
each), and for each request [start, first token, end, preemptions]. These ran:

- vLLM 0.33.0: Scheduler, or AsyncScheduler where `is_overlapped` is true (v1/core/sched), with its KVCacheManager and
  one group of full attention. The rows of vllm_windows.jsonl have groups of layers with sliding windows beside it.
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

from kvcalc.engines.vllm.pages import Demand, Page, running_blocks
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, Line
from tests.simulation.cases import schedule_of

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


def tables(row: dict[str, Any]) -> tuple[Sequence[int], Sequence[int] | None]:
    """The blocks of a request by its blocks of tokens, when it decodes and when its prompt is computed."""
    if not row.get("windows"):
        return range(10_000), None
    page, rules = row["block_tokens"], row["rules"]
    layers = [Page("full", page, 1), *(Page("sliding", page, 1, span=window) for window in row["windows"])]

    def blocks(number: int, in_flight: int) -> int:
        demand = Demand(min(number * page, row["longest_tokens"]), in_flight)
        return sum(running_blocks(layer, demand) for layer in layers)

    numbers = range(-(-row["longest_tokens"] // page) + 3)
    prompt_table = [blocks(number, 2 * rules["step_tokens"]) for number in numbers]
    if row.get("reserves"):
        return prompt_table, None
    return [blocks(number, 1) for number in numbers], prompt_table


def scheduled(row: dict[str, Any]) -> list[list[float]]:
    """What the simulation does with the requests of a row."""
    page, names = row["block_tokens"], row.get("names") or [()] * len(row["requests"])
    is_sglang = row["engine"] == "sglang"
    pool = BlockPool(row["blocks"], page, *((range(0, 10_000 * page, page),) if is_sglang else tables(row)))
    named = row.get("named_tokens", page)
    prefixes = PrefixCache(pool, named, pool.units(named), finds_own=not is_sglang, merges=is_sglang)
    requests = [Request(n, float(a), p, o, names=tuple(names[n])) for n, (a, p, o) in enumerate(row["requests"])]
    kind = PrefillFirstReplica if is_sglang else MixedReplica
    schedule = schedule_of(row["engine"].replace("_", "-"))._replace(overlaps=row["rules"]["is_overlapped"])
    rules = Rules(schedule, row["rules"]["step_tokens"], row["rules"]["max_running"])
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


def test_layers_with_windows_hold_the_blocks_that_vllm_gives_them() -> None:
    """Only the order within a step, which decides who is preempted in a few cases, is not the same."""
    rows = rows_of("vllm_windows")
    same = [scheduled(row) == row["expected"] for row in rows]
    assert sum(same) / len(rows) > 0.95
    # With the blocks that vLLM reserves at the start, fewer requests would run.
    without = [scheduled({**row, "reserves": True}) == row["expected"] for row in rows]
    assert sum(without) < sum(same) - len(rows) // 4


@pytest.mark.parametrize("engine", FEWEST)
@pytest.mark.parametrize("change", [{"is_overlapped": False}, {"max_running": 1}])
def test_other_rules_give_other_steps(engine: str, change: dict[str, Any]) -> None:
    rows = [row for row in rows_of(engine) if row["rules"]["is_overlapped"]]
    changed = [{**row, "rules": {**row["rules"], **change}} for row in rows]
    assert sum(scheduled(row) != row["expected"] for row in changed) > len(rows) // 3
