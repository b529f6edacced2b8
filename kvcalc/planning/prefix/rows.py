"""The parts of a prefix document: the trace, the engine, and what a cache of one size and each tier saves and costs.

They follow from the prompts of the trace, run through the stack of a prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines.reuse import CPU, DISK
from kvcalc.errors import UsageError
from kvcalc.notes import Note
from kvcalc.planning.prefix.cost import BlockBytes, PrefillTime, Prices
from kvcalc.records import NamedTuple
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case
from kvcalc.server.reuse import tier_rate
from kvcalc.traces import Trace
from kvcalc.traces.reuse import LruStack, NotAPrefixError
from kvcalc.traces.reuse_counts import Reuse

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.throughput.hardware import Gpu


DEVICE = "device"


class Setup(NamedTuple):
    """The case of a model, its engine's prefix cache, and what its figures need."""

    case: Case
    prefixes: Prefixes
    block: BlockBytes
    prefill: PrefillTime | None
    prices: Prices
    profile: Profile

    @property
    def gpu(self) -> Gpu | None:
        devices = self.case.question.devices
        return None if devices is None else devices.gpu


def describe_size(reuse: Reuse, profile: Profile, setup: Setup | None) -> documents.PrefixRow:
    """A row of the curve: what a cache of one size finds, saves and costs."""
    stack, blocks = profile.stack, reuse.cache_blocks
    total = stack.counted_tokens
    best = None if stack.next_uses is None else stack.next_uses.hit_tokens(blocks) / total
    saved = share = gpu_seconds = None
    costs: dict[str, float | None] = {DEVICE: None, CPU: None, DISK: None}
    if setup is not None and setup.prefill is not None:
        saved = setup.prefill.seconds(reuse.hit_tokens, reuse.hit_squares)
        share = saved / setup.prefill.seconds(total, stack.counted_squares)
        gpu_seconds = saved * setup.block.devices
        for name, cost in _memory_costs(setup, blocks).items() if gpu_seconds else ():
            costs[name] = None if cost is None else cost / gpu_seconds
    return {
        "cache_blocks": blocks,
        "cache_tokens": blocks * stack.block_tokens,
        "cache_bytes": None if setup is None else blocks * setup.block.of_replica,
        "cache_bytes_per_device": None if setup is None else blocks * setup.block.per_device,
        "hit_rate": reuse.hit_tokens / total,
        "hit_rate_low": reuse.low_tokens / total,
        "hit_rate_high": reuse.high_tokens / total,
        "optimal_hit_rate": best,
        "saved_prefill_seconds": saved,
        "saved_prefill_share": share,
        "saved_ttft_seconds": None if saved is None else saved / stack.num_counted,
        "saved_gpu_seconds": gpu_seconds,
        "device_cost_per_gpu_second": costs[DEVICE],
        "cpu_cost_per_gpu_second": costs[CPU],
        "disk_cost_per_gpu_second": costs[DISK],
    }


def _memory_costs(setup: Setup, blocks: int) -> dict[str, float | None]:
    """What keeping these blocks for the time of the trace costs, in each kind of memory."""
    seconds, prices = setup.profile.counted_seconds, setup.prices
    if not seconds:
        return dict.fromkeys((DEVICE, CPU, DISK))
    share = blocks * setup.block.per_device / setup.case.devices.gpu.memory_bytes
    held = blocks * setup.block.in_tier
    return {
        DEVICE: prices.of_device(share * setup.block.devices, seconds),
        CPU: prices.of_tier(CPU, held, seconds),
        DISK: prices.of_tier(DISK, held, seconds),
    }


def describe_trace(profile: Profile) -> documents.PrefixTrace:
    """The `trace` part of a prefix document."""
    trace, stack = profile.trace, profile.stack
    return {
        "file": trace.name,
        "format": cast(Any, trace.format),
        "num_requests": stack.num_requests,
        "warm_up_requests": stack.num_requests - stack.num_counted,
        "num_bad_rows": trace.num_bad_rows,
        "first_bad_row": trace.first_bad_row,
        "duration_seconds": profile.duration_seconds if trace.has_arrivals else None,
        "prompt_tokens": stack.num_tokens,
        "answer_tokens": profile.answer_tokens,
        "longest_prompt_tokens": profile.longest_prompt,
        "block_tokens": stack.block_tokens,
        "num_blocks": stack.num_blocks,
        "distinct_blocks": stack.distinct_blocks,
        "largest_request_blocks": stack.largest_request,
        "sampling_rate": stack.sampling_rate,
    }


def describe_engine(setup: Setup) -> documents.PrefixEngine:
    """The `engine` part of a prefix document. Bytes are those of one block of the trace."""
    case, workload = setup.case, setup.case.workload
    return {
        "name": case.engine.name,
        "version": case.engine.version,
        "tensor_parallel_size": workload.layout.tensor_parallel_size,
        "pipeline_parallel_size": workload.layout.pipeline_parallel_size,
        "kv_dtype": workload.kv_dtype.name,
        "block_tokens": setup.prefixes.block_tokens,
        "bytes_per_trace_block": setup.block.of_replica,
        "bytes_per_trace_block_per_device": setup.block.per_device,
        "offloaded_bytes_per_trace_block": setup.block.in_tier,
    }


def describe_prefill(setup: Setup, prefill: PrefillTime) -> documents.PrefixPrefill:
    """The `prefill` part of a prefix document: computing the counted prompts without a cache."""
    stack = setup.profile.stack
    seconds = prefill.seconds(stack.counted_tokens, stack.counted_squares)
    return {
        "seconds": seconds,
        "gpu_seconds": seconds * setup.block.devices,
        "mean_seconds": seconds / stack.num_counted,
        "worst_error": prefill.worst_error,
    }


def describe_tiers(
    setup: Setup, offload: Sequence[tuple[str, int]], bandwidths: Mapping[str, int], notes: list[Note]
) -> list[documents.PrefixTier]:
    """A row for the device's memory, if it is known, and for each tier: what is found there and not before it."""
    memory = _device_memory(setup.case, notes)
    block, stack = setup.block, setup.profile.stack
    names = [DEVICE, *(name for name, _ in offload)]
    sizes = [memory or 0, *(size for _, size in offload)]
    per_block = [block.per_device, *(block.in_tier for _ in offload)]
    own = [size // each for size, each in zip(sizes, per_block)]
    # What is found in each tier or one before it.
    at_sizes = stack.at(list(accumulate(own, max if setup.case.engine_class.reuse().copies_at_once else None)))
    rows: list[documents.PrefixTier] = []
    tokens_before = squares_before = 0.0
    for name, size, blocks, reuse in zip(names, sizes, own, at_sizes):
        tokens, squares = reuse.hit_tokens - tokens_before, reuse.hit_squares - squares_before
        rate = None if name == DEVICE else tier_rate(name, setup.gpu, bandwidths, notes, "tiers")
        moved = tokens / stack.block_tokens * (block.per_device if name == CPU else block.in_tier)
        if name != DEVICE or memory is not None:
            rows.append({
                "name": cast(Any, name),
                "memory_bytes": size,
                "cache_blocks": blocks,
                "hit_rate": tokens / stack.counted_tokens,
                "prefill_seconds": None if setup.prefill is None else setup.prefill.seconds(tokens, squares),
                "bandwidth_bytes_per_second": rate,
                "load_seconds": None if rate is None else moved / rate,
            })  # fmt: skip
        tokens_before, squares_before = reuse.hit_tokens, reuse.hit_squares
    return rows


def _device_memory(case: Case, notes: list[Note]) -> int | None:
    """The memory for the cache on one device, which running requests use too. None if it is not known."""
    if case.question.devices is None:
        return case.question.kv_memory_bytes
    memory = budget(case)
    if not isinstance(memory, Budget):
        notes.append(Note("fit", "unknown", memory))
        return None
    if memory.pool_bytes <= 0:
        notes.append(Note("fit", "does-not-fit", f"no memory of {case.devices.gpu.name} is left for the cache"))
    return max(memory.pool_bytes, 0)


_HINT = "give a trace with hash_ids (Mooncake, Qwen-Bailian) or with prompt_token_ids"
_CONTRADICTION = "the hash_ids contradict earlier rows: an id must stand for a block and all blocks before it"
# The progress is reported after this many requests.
_REPORT = 2000


class Profile(NamedTuple):
    """A trace that has been read: its stack, and what its requests have in total.

    `counted_seconds` are those from the first counted request to the last.
    """

    trace: Trace
    stack: LruStack
    duration_seconds: float
    counted_seconds: float
    answer_tokens: int
    longest_prompt: int


def profile(
    trace: Trace,
    engine_tokens: int,
    most_blocks: int,
    report: Callable[[int], None] | None,
    warm_up: int,
    optimal: bool,
) -> Profile:
    """Read all requests of `trace`. An engine finds prefixes in steps of `engine_tokens` tokens.

    The first `warm_up` requests fill the cache and are not counted. `optimal` keeps the next uses of all blocks.
    `report` is called with the number of requests from time to time. Raises what reading a trace raises, and UsageError
    (exit 2) if the trace says nothing about shared prefixes, or if its blocks are not whole blocks of the engine.
    """
    stack: LruStack | None = None
    seconds, answers, longest = 0.0, 0, 0
    start = None
    for request in trace:
        blocks, block_tokens = request.block_hashes, request.block_tokens
        if blocks is None or block_tokens is None:
            raise UsageError(f"{trace.name}: a trace in the format {trace.format} does not name shared blocks", _HINT)
        if stack is None:
            if block_tokens % engine_tokens:
                words = f"blocks of {block_tokens:,} tokens are not whole blocks of the engine, which have"
                raise UsageError(f"{trace.name}: {words} {engine_tokens:,}", "set the engine's --block-size")
            stack = LruStack(block_tokens, most_blocks, optimal)
        # The last token is always computed, for its logits.
        usable = (request.prompt_tokens - 1) // engine_tokens * engine_tokens
        try:
            stack.add(blocks, request.prompt_tokens, usable, stack.num_requests >= warm_up)
        except NotAPrefixError:
            trace.reject(request, _CONTRADICTION)
            continue
        seconds = request.arrival_seconds
        if start is None and stack.num_counted:
            start = seconds
        answers += request.answer_tokens
        longest = max(longest, request.prompt_tokens)
        if report is not None and not stack.num_requests % _REPORT:
            report(stack.num_requests)
    if stack is None:
        raise UsageError(f"{trace.name}: no request in it", _HINT)
    if start is None:
        raise UsageError(f"{trace.name}: no request after the warm-up", "use a smaller --after")
    return Profile(trace, stack, seconds, seconds - start, answers, longest)
