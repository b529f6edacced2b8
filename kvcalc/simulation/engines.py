"""The scheduler and the pool of an engine: what its rules allow, and how many blocks it has, by kvcalc's account."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvcalc.engines.options import Given
from kvcalc.errors import DoesNotFitError, ModelError, UsageError
from kvcalc.planning.admission import BATCH_TOKENS, most_at_once, overlaps_steps, prefill_step_tokens, step_rules
from kvcalc.planning.attention_replicas import whole_copies
from kvcalc.planning.budget import budget
from kvcalc.planning.case import Case
from kvcalc.records import NamedTuple
from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.lock_step import LockStep, OfRank
from kvcalc.simulation.mixed import MixedReplica
from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.prefill_first import PrefillFirstReplica
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.replica import Replica
from kvcalc.simulation.requests import Request
from kvcalc.simulation.routing import FewestTokens, LeastLoaded, RoundRobin, Router
from kvcalc.simulation.rules import Lag, Rules
from kvcalc.simulation.server import Server
from kvcalc.simulation.slots import SlotsReplica
from kvcalc.simulation.times import ModelTimes
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.scheduling import STEP_TOKENS, StepRules

SIMULATED = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")

_KINDS: dict[str, type[Replica]] = {"prefill first": PrefillFirstReplica, "slots": SlotsReplica}


class Scheduler(NamedTuple):
    """The scheduler of an engine for one case, and the blocks that each of its attention replicas has.

    `finds_own` is whether a preempted request finds its own blocks again, as far as they are still in the cache.
    """

    name: str
    rules: Rules
    capacity: int | None
    block_tokens: int
    table: Sequence[int]
    prompt_table: Sequence[int] | None = None
    finds_own: bool = False
    attention_replicas: int = 1
    router: type[Router] = LeastLoaded

    def most_units(self, tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens holds. It is the capacity + 1 beyond the table."""
        if self.capacity is None:
            return 0
        place, table = -(-tokens // self.block_tokens), self.prompt_table or self.table
        return table[place] if place < len(table) else self.capacity + 1

    def fits(self, request: Request) -> bool:
        """Whether a request can ever run to its end."""
        if self.capacity is None:
            return True
        tokens = request.total_tokens + self.rules.lookahead_tokens
        if self.name == "prefill first":
            return tokens + self.block_tokens < self.capacity
        return self.most_units(tokens) <= self.capacity

    def cannot_share(self, tokens: int) -> str | None:
        """Why named blocks of `tokens` tokens are not shared between requests. None if they are."""
        if self.capacity is None:
            return "slots keep their requests apart"
        if tokens % self.block_tokens:
            return f"blocks of {self.block_tokens} tokens do not make up those of {tokens} tokens in the trace"
        return None if isinstance(self.table, range) else "layers with windows or states share other blocks"

    def server(self, times: ModelTimes, arrivals: Arrivals, shared_tokens: int | None = None) -> Server:
        """A replica for the requests of `arrivals`. They share named blocks of `shared_tokens` tokens, or none."""
        if self.attention_replicas == 1:
            return self._rank(times, arrivals, shared_tokens)
        ranks = [self._rank(times, OfRank(arrivals), shared_tokens) for _ in range(self.attention_replicas)]
        return LockStep(self.router(ranks), times, arrivals)

    def _rank(self, times: ModelTimes, arrivals: Arrivals, shared_tokens: int | None) -> Replica:
        pool = BlockPool(self.capacity, self.block_tokens, self.table, self.prompt_table)
        kind = _KINDS.get(self.name, MixedReplica)
        prefixes, tokens = None, shared_tokens or self.block_tokens
        if shared_tokens is not None or self.finds_own:
            # SGLang's radix cache keeps one copy of a prefix (insert in mem_cache/radix_cache.py); vLLM's blocks stay.
            merges = self.name == "prefill first"
            prefixes = PrefixCache(pool, tokens, pool.units(tokens), finds_own=self.finds_own, merges=merges)
        return kind(self.rules, times, pool, arrivals, prefixes)


def scheduler_of(case: Case, model: SpeedModel, longest_tokens: int, buffer_bytes: int = 0) -> Scheduler:
    """The scheduler of the case's engine for requests of up to `longest_tokens` tokens.

    `buffer_bytes` of a device's memory are not for the cache, such as buffers for sending it.
    Raises UsageError (exit 2) for an engine or a layout that is not simulated, ModelError (exit 3) if the memory for
    the cache is not known, and DoesNotFitError (exit 4) if there is none.
    """
    _check(case)
    found = budget(case)
    if isinstance(found, str):
        raise ModelError(f"{case.model.name} cannot be simulated: {found}")
    if buffer_bytes:
        left = found.pool_bytes - buffer_bytes, found.offered_bytes - buffer_bytes
        found = found._replace(pool_bytes=left[0], offered_bytes=left[1])
    if found.pool_bytes <= 0:
        raise DoesNotFitError(
            f"{case.model.name} leaves no memory for the cache on {case.devices.gpu.name}",
            "kvcalc fit says how many devices it needs",
        )
    constants, stages = model.constants, case.workload.pipeline_parallel_size
    replicas, drafted = case.workload.data_parallel_size, case.question.speculative
    checked = 1 if drafted is None else 1 + drafted.num_tokens
    most = most_at_once(case, found)
    running = max(1, most // replicas)
    engine, overlaps, lag = case.engine_name, bool(overlaps_steps(case)), _lag(constants, step_rules(case, most))
    drafts: dict[str, Any] = {
        "tokens_per_step": Fraction(model.tokens_per_step).limit_denominator(1000),
        "checked_tokens": checked,
    }
    if engine == "llama.cpp":
        slots = found.running_limit(longest_tokens)
        given = Given(engine, case.settings).optional_count("parallel")
        running = running if slots is None else min(given or running, slots)
        rules = Rules(
            BATCH_TOKENS, max(running, 1), "answer", lag=lag, ends_chunks=case.engine.prompt_stops(case.spec), **drafts
        )
        return Scheduler("slots", rules, None, 1, ())
    if drafted is not None:
        from kvcalc.planning.drafting import slots_of

        drafts["lookahead_tokens"] = slots_of(drafted, case.engine, serves_requests=True)
        longest_tokens += 2 * checked + drafts["lookahead_tokens"]
    dtype = case.workload.kv_dtype
    device = case.allocation.largest_stage(case.share, dtype, longest_tokens, 1)
    # TensorRT-LLM's hybrids have states for the requests that fit at full length, unless another number is given.
    limit = found.running_limit(longest_tokens)
    batch = running if limit is None else min(running, case.workload.attention_batch(max(1, limit)))
    capacity, block_tokens, table, prompt_table = case.allocation.running_pool(
        device, dtype, longest_tokens, batch, found.offered_bytes
    )
    if engine == "sglang":
        tokens = max(prefill_step_tokens(case), block_tokens)
        rules = Rules(tokens, running, is_overlapped=overlaps, lag=lag, **drafts)
        return Scheduler("prefill first", rules, capacity, block_tokens, table, None, False, replicas, RoundRobin)
    # With pipeline stages, each of them has a step of its own in the time of one step of the model.
    if engine == "vllm":
        tokens = max(prefill_step_tokens(case) * stages, running * checked)
        rules = Rules(tokens, running, is_overlapped=overlaps, lag=lag, **drafts)
        # A preempted request is looked up in the prefix cache when it starts again. SGLang's retracted requests are not
        # kept in its radix cache (release_req, srt/managers/schedule_batch.py).
        finds_own = not case.engine.prefixes_off and isinstance(table, range)
        return Scheduler("running first", rules, capacity, block_tokens, table, prompt_table, finds_own, replicas)
    # A prompt that is not divided must fit into a step, beside the requests that decode.
    tokens = max(prefill_step_tokens(case) * stages, longest_tokens + running * checked)
    rules = Rules(tokens, running, "answer", is_chunked=False, is_overlapped=overlaps, lag=lag, **drafts)
    return Scheduler("guaranteed no evict", rules, capacity, block_tokens, table, None, False, replicas, FewestTokens)


def _lag(constants: Constants, rules: StepRules | None) -> Lag:
    """The part of the fitted waiting time (kvcalc.throughput.serving) that is not scheduling.

    The simulation has the steps of the scheduler, and the prompts of other requests.
    """
    return Lag(
        constants.ttft_seconds,
        constants.ttft_steps - (0.0 if rules is None else rules.counted_steps),
        constants.ttft_prompt_steps / STEP_TOKENS,
        constants.ttft_request_seconds,
    )


def _check(case: Case) -> None:
    if case.engine_name not in SIMULATED:
        raise UsageError(
            f"--engine {case.engine_name}: its scheduler is not simulated", f"one of {', '.join(SIMULATED)}"
        )
    if whole_copies(case.spec, case.workload):
        raise UsageError(
            "--dp: copies of a model without experts are replicas", f"--replicas {case.workload.data_parallel_size}"
        )
    if case.workload.prompt_ranks > 1:
        raise UsageError(
            "prefill context parallelism is not simulated",
            "leave out -pcp, or --attn-cp-size",
        )
