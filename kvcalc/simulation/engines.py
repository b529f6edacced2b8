"""The scheduler and the pool of an engine: what its rules allow, and how many blocks it has, by kvcalc's account."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcalc.errors import DoesNotFitError, ModelError, UsageError
from kvcalc.memory.engines.options import Given
from kvcalc.memory.reserve.by_device import sglang_prefill_tokens
from kvcalc.planning.admission import most_at_once
from kvcalc.planning.budget import Budget, budget
from kvcalc.planning.case import Case
from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.mixed import MixedReplica
from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.prefill_first import PrefillFirstReplica
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.replica import Replica
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Lag, Rules
from kvcalc.simulation.times import ModelTimes
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import STEP_TOKENS

SIMULATED = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")

# max_num_tokens of TensorRT-LLM 1.3 (llmapi/llm_args.py), and n_batch of llama.cpp (common/common.h).
_TENSORRT_TOKENS, _LLAMA_CPP_TOKENS = 8192, 2048


class Scheduler(NamedTuple):
    """The scheduler of an engine for one case, and the blocks that each replica has.

    `finds_own` is whether a preempted request finds its own blocks again, as far as they are still in the cache.
    """

    name: str
    rules: Rules
    capacity: int | None
    block_tokens: int
    table: Sequence[int]
    finds_own: bool = False

    def units(self, tokens: int) -> int:
        """The blocks that a request of `tokens` tokens holds. It is the capacity + 1 beyond the table."""
        if self.capacity is None:
            return 0
        place = -(-tokens // self.block_tokens)
        return self.table[place] if place < len(self.table) else self.capacity + 1

    def fits(self, request: Request) -> bool:
        """Whether a request can ever run to its end."""
        if self.capacity is None:
            return True
        if self.name == "prefill first":
            return request.total_tokens + self.block_tokens < self.capacity
        return self.units(request.total_tokens) <= self.capacity

    def cannot_share(self, tokens: int) -> str | None:
        """Why named blocks of `tokens` tokens are not shared between requests. None if they are."""
        if self.capacity is None:
            return "slots keep their requests apart"
        if tokens % self.block_tokens:
            return f"blocks of {self.block_tokens} tokens do not make up those of {tokens} tokens in the trace"
        return None if isinstance(self.table, range) else "layers with windows or states share other blocks"

    def replica(
        self, times: ModelTimes, requests: Sequence[Request], concurrency: int | None, shared_tokens: int | None = None
    ) -> Replica:
        """A replica that serves `requests`, in a closed loop if there is a `concurrency`.

        They share named blocks of `shared_tokens` tokens, or none.
        """
        pool = BlockPool(self.capacity, self.block_tokens, self.table)
        arrivals = Arrivals(requests, concurrency)
        kind = PrefillFirstReplica if self.name == "prefill first" else MixedReplica
        prefixes, tokens = None, shared_tokens or self.block_tokens
        if shared_tokens is not None or self.finds_own:
            prefixes = PrefixCache(pool, tokens, pool.units(tokens), finds_own=self.finds_own)
        return kind(self.rules, times, pool, arrivals, prefixes)


def scheduler_of(case: Case, model: SpeedModel, longest_tokens: int) -> Scheduler:
    """The scheduler of the case's engine for requests of up to `longest_tokens` tokens.

    Raises UsageError (exit 2) for an engine or a layout that is not simulated, ModelError (exit 3) if the memory for
    the cache is not known, and DoesNotFitError (exit 4) if there is none.
    """
    _check(case, model)
    found = budget(case)
    if isinstance(found, str):
        raise ModelError(f"{case.model.name} cannot be simulated: {found}")
    if found.pool_bytes <= 0:
        raise DoesNotFitError(
            f"{case.model.name} leaves no memory for the cache on {case.devices.gpu.name}",
            "kvcalc fit says how many devices it needs",
        )
    constants, stages = model.constants, case.workload.pipeline_parallel_size
    running = most_at_once(case, constants.max_sequences)
    engine = case.engine_name
    if engine == "llama.cpp":
        slots = found.running_limit(longest_tokens)
        given = Given(engine, case.settings).optional_count("parallel")
        running = running if slots is None else min(given or running, slots)
        rules = Rules(_LLAMA_CPP_TOKENS, max(running, 1), "answer", lag=_lag(constants, is_overlapped=False))
        return Scheduler("slots", rules, None, 1, ())
    capacity, block_tokens, table = _blocks(case, found, longest_tokens)
    if engine == "sglang":
        tokens, lag = sglang_prefill_tokens(case.devices.gpu.memory_bytes), _lag(constants, is_overlapped=True)
        rules = Rules(tokens, running, is_overlapped=True, lag=lag)
        return Scheduler("prefill first", rules, capacity, block_tokens, table)
    # With pipeline stages, each of them has a step of its own in the time of one step of the model.
    if engine == "vllm":
        tokens = Given(engine, case.settings).count("max-num-batched-tokens", 8192) * stages
        overlaps = bool(case.rules.settings.get("async_scheduling")) and stages == 1
        rules = Rules(max(tokens, running), running, is_overlapped=overlaps, lag=_lag(constants, overlaps))
        # A preempted request is looked up in the prefix cache when it starts again. SGLang's retracted requests are not
        # kept in its radix cache (release_req, srt/managers/schedule_batch.py).
        finds_own = bool(case.rules.settings.get("enable_prefix_caching")) and isinstance(table, range)
        return Scheduler("running first", rules, capacity, block_tokens, table, finds_own)
    overlaps = stages == 1
    lag = _lag(constants, overlaps)
    # A prompt that is not divided must fit into a step, beside the requests that decode.
    tokens = max(_TENSORRT_TOKENS * stages, longest_tokens + running)
    rules = Rules(tokens, running, "answer", is_chunked=False, is_overlapped=overlaps, lag=lag)
    return Scheduler("guaranteed no evict", rules, capacity, block_tokens, table)


def _lag(constants: Constants, is_overlapped: bool) -> Lag:
    """The part of the fitted waiting time (kvcalc.throughput.serving) that is not scheduling.

    The simulation has the rest of the step that runs when a request arrives, which is half a step on average, the next
    one if steps overlap, the step that computes the prompt, and the prompts of other requests.
    """
    return Lag(
        constants.ttft_seconds,
        max(0.0, constants.ttft_steps - (2.5 if is_overlapped else 1.5)),
        constants.ttft_prompt_steps / STEP_TOKENS,
        constants.ttft_wave * constants.ttft_request_seconds,
    )


def _check(case: Case, model: SpeedModel) -> None:
    if case.engine_name not in SIMULATED:
        raise UsageError(
            f"--engine {case.engine_name}: its scheduler is not simulated", f"one of {', '.join(SIMULATED)}"
        )
    if case.workload.data_parallel_size > 1:
        raise UsageError("--dp: attention replicas are not simulated", "leave it out; --replicas N adds whole replicas")
    if model.has_host_part:
        raise UsageError("parts of the model in host memory are not simulated", "leave out -ngl and --n-cpu-moe")


def _blocks(case: Case, found: Budget, longest_tokens: int) -> tuple[int | None, int, Sequence[int]]:
    """The blocks of a replica, the tokens in one, and the blocks of a request by its number of blocks of tokens.

    For SGLang a unit is a token.
    """
    rules, dtype = case.rules, case.workload.kv_dtype
    device = rules.largest_stage(case.share, dtype, longest_tokens, 1)
    size = rules.block_tokens(device, dtype)
    numbers = -(-longest_tokens // size) + 2
    whole = rules.blocks(device, dtype, longest_tokens, 1, found.offered_bytes)
    if case.engine_name == "sglang":
        return whole["kv_cache_tokens"], size, range(0, (numbers + 1) * size, size)
    capacity, block_bytes = whole["num_gpu_blocks"], whole["bytes_per_block"]
    if capacity is None:
        return None, 1, ()
    if case.engine_name == "tensorrt-llm":
        return capacity, size, range(numbers + 1)
    # One block is never given to a request (null_block, v1/core/block_pool.py).
    table = [0]
    for number in range(1, numbers + 1):
        held = rules.blocks(device, dtype, number * size, 1, None)["request_bytes"]
        table.append(held // block_bytes)
        if table[-1] > capacity:
            break
    even = range(0, len(table) * table[1], table[1])
    return capacity - 1, size, even if table == list(even) else table
