"""How much a larger prefix cache helps: hit rate, saved prefill and cost at every size, from a trace in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.workload import BEYOND_MODEL
from kvcalc.model.describe import describe_model
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.budget import Budget, budget, describe_hardware
from kvcalc.planning.cache_tiers import CPU, DISK
from kvcalc.planning.case import Case, make_case
from kvcalc.planning.prefix_cost import (
    BlockBytes,
    PrefillTime,
    Prices,
    block_bytes,
    prefill_time,
    prefixes_of,
    reach_of,
)
from kvcalc.planning.prefix_trace import Profile, profile
from kvcalc.planning.question import Question
from kvcalc.planning.reuse import check_tiers
from kvcalc.planning.tier_rates import tier_rate
from kvcalc.planning.tiers import check_engine_tiers
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.traces import BAD_ROWS, read_trace
from kvcalc.traces.reuse import MOST_BLOCKS
from kvcalc.traces.reuse_counts import Reuse

if TYPE_CHECKING:
    from kvcalc.memory.engines.prefixes import Prefixes
    from kvcalc.throughput.hardware import Gpu

KNEE_SHARE = 0.9
"""The knee is the smallest cache that finds this share of what a cache without a limit finds."""

DEVICE = "device"
# Blocks of token ids if no engine says otherwise: vLLM's block_size.
_TOKEN_ID_BLOCK = 16
_MOST_ROWS = 1000
# A prefill time that is further off than this is worth a remark.
_WORTH_A_NOTE = 0.02


class Sizes(NamedTuple):
    """The sizes of the curve, in bytes of a replica or in tokens. Without either, they double up to all blocks."""

    memory_bytes: Sequence[int] = ()
    tokens: Sequence[int] = ()


class _Setup(NamedTuple):
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


def prefix_curve(
    path: str,
    question: Question | None = None,
    *,
    sizes: Sizes = Sizes(),
    offload: Sequence[tuple[str, int]] = (),
    bandwidths: Mapping[str, int] | None = None,
    prices: Prices = Prices(),
    format: str | None = None,
    block_tokens: int | None = None,
    most_blocks: int = MOST_BLOCKS,
    report: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The prefix document of the trace at `path`, or on standard input if it is `-`.

    `question` has the model, the engine and the devices; without it, there are only hit rates. `offload` are tiers and
    their sizes in bytes, in the order in which they are searched, and `bandwidths` their rates in bytes per second.
    `format` and `block_tokens` are those of `kvcalc.traces.read_trace`. `most_blocks` distinct blocks are counted
    exactly; more are sampled. `report` is called with the number of requests from time to time.

    Raises UsageError (exit 2) for a trace that cannot be used, and what `make_case` raises.
    """
    notes: list[Note] = []
    case = None if question is None else make_case(question)
    prefixes = None if case is None else prefixes_of(case)
    step = 1 if prefixes is None else prefixes.block_tokens
    check_tiers(offload, tuple((bandwidths or {}).items()))
    if case is not None:
        check_engine_tiers(case.rules.name, offload)
    for given, name in ((sizes.memory_bytes, "--cache-memory"), (offload, "--offload")):
        if given and case is None:
            raise UsageError(f"{name} needs a model", "for example kvcalc prefix TRACE llama-3-70b")
    if max(len(sizes.memory_bytes), len(sizes.tokens)) > _MOST_ROWS:
        raise UsageError(f"more than {_MOST_ROWS:,} sizes", "use fewer")
    trace = read_trace(path, format, block_tokens, _TOKEN_ID_BLOCK if prefixes is None else step)
    found = profile(trace, step, most_blocks, report)
    setup = None
    if case is not None and prefixes is not None:
        notes += case.notes
        mean = found.stack.num_tokens // found.stack.num_requests
        block = block_bytes(case, prefixes, found.stack.block_tokens, mean, notes)
        setup = _Setup(case, prefixes, block, _prefill_of(case, found, notes), prices, found)
    blocks = _sizes(sizes, found, setup)
    knee = found.stack.smallest(KNEE_SHARE)
    *curve, knee_row, unlimited = (
        _row(reuse, found, setup) for reuse in found.stack.at([*blocks, knee, found.stack.distinct_blocks])
    )
    tiers = [] if setup is None else _tiers(setup, offload, bandwidths or {}, notes)
    _add_notes(found, blocks, notes)
    if setup is not None and found.longest_prompt > (setup.case.spec.max_position_embeddings or found.longest_prompt):
        limit = setup.case.spec.max_position_embeddings
        text = f"the longest prompt has {found.longest_prompt:,} tokens, but the model's limit is {limit:,}"
        notes.append(Note("trace", BEYOND_MODEL, text))
    return {
        "schema_version": SCHEMA_VERSION,
        "trace": _describe_trace(found),
        "model": None if setup is None else describe_model(setup.case.spec),
        "engine": None if setup is None else _describe_engine(setup),
        "hardware": None if setup is None or setup.gpu is None else describe_hardware(setup.case),
        "prefill": None if setup is None or setup.prefill is None else _describe_prefill(setup, setup.prefill),
        "prices": {
            "device_per_hour": prices.device,
            "cpu_per_gib_hour": prices.memory.get(CPU),
            "disk_per_gib_hour": prices.memory.get(DISK),
        },
        "curve": curve,
        "knee": knee_row,
        "knee_share": KNEE_SHARE,
        "unlimited": unlimited,
        "tiers": tiers,
        "warnings": describe_notes(notes),
    }


def _prefill_of(case: Case, found: Profile, notes: list[Note]) -> PrefillTime | None:
    """How long prefills take. None, with a note, if the speed is not known or there is no device."""
    if case.question.devices is None:
        return None
    from kvcalc.planning.throughput import speed_of

    speed = speed_of(case, notes)
    if isinstance(speed, str):
        notes.append(Note("throughput", "unknown", speed))
        return None
    fitted = prefill_time(speed.model, found.longest_prompt)
    if fitted.worst_error > _WORTH_A_NOTE:
        text = f"the prefill time of a single prompt is approximated within {fitted.worst_error:.0%}"
        notes.append(Note("throughput", "fitted-prefill", text))
    return fitted


def _sizes(sizes: Sizes, found: Profile, setup: _Setup | None) -> list[int]:
    """The sizes of the curve, in blocks."""
    stack = found.stack
    if sizes.memory_bytes and setup is not None:
        return [size // max(setup.block.of_replica, 1) for size in sizes.memory_bytes]
    if sizes.tokens:
        return [tokens // stack.block_tokens for tokens in sizes.tokens]
    unit = 1 if setup is None else max(setup.block.of_replica, 1)
    size, blocks = 1, []
    while size < stack.largest_request * unit:
        size *= 2
    while size // unit < stack.distinct_blocks:
        blocks.append(size // unit)
        size *= 2
    return [*blocks, size // unit]


def _row(reuse: Reuse, found: Profile, setup: _Setup | None) -> dict[str, Any]:
    stack, blocks = found.stack, reuse.cache_blocks
    total = stack.num_tokens
    row: dict[str, Any] = {
        "cache_blocks": blocks,
        "cache_tokens": blocks * stack.block_tokens,
        "cache_bytes": None if setup is None else blocks * setup.block.of_replica,
        "cache_bytes_per_device": None if setup is None else blocks * setup.block.per_device,
        "hit_rate": reuse.hit_tokens / total,
        "hit_rate_low": reuse.low_tokens / total,
        "hit_rate_high": reuse.high_tokens / total,
    }
    saved = gpu_seconds = None
    costs: dict[str, float | None] = {DEVICE: None, CPU: None, DISK: None}
    if setup is not None and setup.prefill is not None:
        saved = setup.prefill.seconds(reuse.hit_tokens, reuse.hit_squares)
        gpu_seconds = saved * setup.block.devices
        costs = {name: _each(cost, gpu_seconds) for name, cost in _memory_costs(setup, blocks).items()}
    share = None
    if saved is not None and setup is not None and setup.prefill is not None:
        share = saved / setup.prefill.seconds(total, stack.num_squares)
    return {
        **row,
        "saved_prefill_seconds": saved,
        "saved_prefill_share": share,
        "saved_ttft_seconds": None if saved is None else saved / stack.num_requests,
        "saved_gpu_seconds": gpu_seconds,
        "device_cost_per_gpu_second": costs[DEVICE],
        "cpu_cost_per_gpu_second": costs[CPU],
        "disk_cost_per_gpu_second": costs[DISK],
    }


def _memory_costs(setup: _Setup, blocks: int) -> dict[str, float | None]:
    """What keeping these blocks for the time of the trace costs, in each kind of memory."""
    seconds, gpu, prices = setup.profile.duration_seconds, setup.gpu, setup.prices
    if not seconds:
        return dict.fromkeys((DEVICE, CPU, DISK))
    share = 0.0 if gpu is None else blocks * setup.block.per_device / gpu.memory_bytes
    held = blocks * setup.block.in_tier
    return {
        DEVICE: prices.of_device(share * setup.block.devices, seconds),
        CPU: prices.of_tier(CPU, held, seconds),
        DISK: prices.of_tier(DISK, held, seconds),
    }


def _each(cost: float | None, number: float) -> float | None:
    return None if cost is None or not number else cost / number


def _tiers(
    setup: _Setup, offload: Sequence[tuple[str, int]], bandwidths: Mapping[str, int], notes: list[Note]
) -> list[dict[str, Any]]:
    """A row for the device's memory, if it is known, and for each tier: what is found there and not before it."""
    memory = _device_memory(setup.case, notes)
    block, stack = setup.block, setup.profile.stack
    names = [DEVICE, *(name for name, _ in offload)]
    sizes = [memory or 0, *(size for _, size in offload)]
    per_block = [block.per_device, *(block.in_tier for _ in offload)]
    own = [size // max(each, 1) for size, each in zip(sizes, per_block)]
    reach = reach_of(setup.case, own)
    found = stack.at(reach)
    rows = []
    before = Reuse(0, 0.0, 0.0, 0.0, 0.0)
    for name, size, blocks, reuse in zip(names, sizes, own, found):
        tokens, squares = reuse.hit_tokens - before.hit_tokens, reuse.hit_squares - before.hit_squares
        rate = None if name == DEVICE else tier_rate(name, setup.gpu, bandwidths, notes, "tiers")
        moved = tokens / stack.block_tokens * (block.per_device if name == CPU else block.in_tier)
        row = {
            "name": name,
            "memory_bytes": size,
            "cache_blocks": blocks,
            "hit_rate": tokens / stack.num_tokens,
            "prefill_seconds": None if setup.prefill is None else setup.prefill.seconds(tokens, squares),
            "bandwidth_bytes_per_second": rate,
            "load_seconds": None if rate is None else moved / rate,
        }
        if name != DEVICE or memory is not None:
            rows.append(row)
        before = reuse
    return rows


def _device_memory(case: Case, notes: list[Note]) -> int | None:
    """The memory for the cache on one device, which running requests use too. None if it is not known."""
    if case.question.devices is None:
        return case.question.kv_memory_bytes
    found = budget(case)
    if not isinstance(found, Budget):
        notes.append(Note("fit", "unknown", found))
        return None
    if found.pool_bytes <= 0:
        notes.append(Note("fit", "does-not-fit", f"no memory of {case.devices.gpu.name} is left for the cache"))
    return max(found.pool_bytes, 0)


def _add_notes(found: Profile, blocks: Sequence[int], notes: list[Note]) -> None:
    trace, stack = found.trace, found.stack
    if trace.num_bad_rows:
        notes.append(Note("trace", BAD_ROWS, trace.bad_rows_text))
    if stack.sampling_rate < 1:
        text = f"one in {1 / stack.sampling_rate:.0f} blocks is sampled; the ranges hold 99% of the errors"
        notes.append(Note("curve", "sampled", text))
    if any(size < stack.largest_request for size in blocks):
        text = f"the largest prompt has {stack.largest_request:,} blocks; smaller caches cannot serve it"
        notes.append(Note("curve", "below-largest-request", text))


def _describe_trace(found: Profile) -> dict[str, Any]:
    trace, stack = found.trace, found.stack
    return {
        "file": trace.name,
        "format": trace.format,
        "num_requests": stack.num_requests,
        "num_bad_rows": trace.num_bad_rows,
        "first_bad_row": trace.first_bad_row,
        "duration_seconds": found.duration_seconds if trace.has_arrivals else None,
        "prompt_tokens": stack.num_tokens,
        "answer_tokens": found.answer_tokens,
        "longest_prompt_tokens": found.longest_prompt,
        "block_tokens": stack.block_tokens,
        "num_blocks": stack.num_blocks,
        "distinct_blocks": stack.distinct_blocks,
        "largest_request_blocks": stack.largest_request,
        "sampling_rate": stack.sampling_rate,
    }


def _describe_engine(setup: _Setup) -> dict[str, Any]:
    case, workload = setup.case, setup.case.workload
    return {
        "name": case.rules.name,
        "version": case.rules.version,
        "tensor_parallel_size": workload.tensor_parallel_size,
        "pipeline_parallel_size": workload.pipeline_parallel_size,
        "kv_dtype": workload.kv_dtype.name,
        "block_tokens": setup.prefixes.block_tokens,
        "bytes_per_trace_block": setup.block.of_replica,
        "bytes_per_trace_block_per_device": setup.block.per_device,
        "offloaded_bytes_per_trace_block": setup.block.in_tier,
    }


def _describe_prefill(setup: _Setup, prefill: PrefillTime) -> dict[str, Any]:
    stack = setup.profile.stack
    seconds = prefill.seconds(stack.num_tokens, stack.num_squares)
    return {
        "seconds": seconds,
        "gpu_seconds": seconds * setup.block.devices,
        "mean_seconds": seconds / stack.num_requests,
        "worst_error": prefill.worst_error,
    }
