"""How much a larger prefix cache helps: hit rate, saved prefill and cost at every size, from a trace in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcalc.engines.reuse import CPU, DISK
from kvcalc.errors import UsageError
from kvcalc.memory.workload import BEYOND_MODEL
from kvcalc.model.describe import describe_model
from kvcalc.notes import BAD_ROWS, Note, describe_notes
from kvcalc.planning.answers.gpus import describe_hardware
from kvcalc.planning.prefix.cost import PrefillTime, Prices, block_bytes, prefill_time, prefixes_of
from kvcalc.planning.prefix.rows import (
    Profile,
    Setup,
    describe_engine,
    describe_prefill,
    describe_size,
    describe_tiers,
    describe_trace,
    profile,
)
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.case import Case, make_case
from kvcalc.server.reuse import check_tiers
from kvcalc.server.reuse.document import check_engine_tiers
from kvcalc.traces import read_trace

if TYPE_CHECKING:
    import kvcalc.documents as documents

KNEE_SHARE = 0.9
"""The knee is the smallest cache that finds this share of what a cache without a limit finds."""

# Blocks of token ids if no engine says otherwise: vLLM's block_size.
_TOKEN_ID_BLOCK = 16
_MOST_ROWS = 1000
# A prefill time that is further off than this is worth a remark.
_WORTH_A_NOTE = 0.02


class Sizes(NamedTuple):
    """The sizes of the curve, in bytes of a replica or in tokens. Without either, they double up to all blocks."""

    memory_bytes: Sequence[int] = ()
    tokens: Sequence[int] = ()


def prefix_curve(
    path: str,
    question: Question | None,
    *,
    sizes: Sizes,
    offload: Sequence[tuple[str, int]],
    bandwidths: Mapping[str, int] | None,
    prices: Prices,
    format: str | None,
    block_tokens: int | None,
    most_blocks: int,
    after: float,
    optimal: bool,
    report: Callable[[int], None] | None = None,
) -> documents.Prefix:
    """The prefix document of the trace at `path`, or on standard input if it is `-`.

    `question` has the model, the engine and the devices; without it, there are only hit rates. `offload` are tiers and
    their sizes in bytes, in the order in which they are searched, and `bandwidths` their rates in bytes per second.
    `format` and `block_tokens` are those of `kvcalc.traces.read_trace`. `most_blocks` distinct blocks are counted
    exactly; more are sampled. The first requests, `after` as a share of all, fill the cache and are not counted.
    `optimal` adds what the best possible policy finds. `report` is called with the number of requests from time to
    time.

    Raises UsageError (exit 2) for a trace that cannot be used, and what `make_case` raises.
    """
    notes: list[Note] = []
    case = None if question is None else make_case(question)
    step = 1 if case is None else prefixes_of(case).block_tokens
    check_tiers(offload, tuple((bandwidths or {}).items()))
    if case is not None:
        check_engine_tiers(case.engine.name, offload)
    for given, name in ((sizes.memory_bytes, "--cache-memory"), (offload, "--offload")):
        if given and case is None:
            raise UsageError(f"{name} needs a model", "for example kvcalc prefix TRACE llama-3-70b")
    if max(len(sizes.memory_bytes), len(sizes.tokens)) > _MOST_ROWS:
        raise UsageError(f"more than {_MOST_ROWS:,} sizes", "use fewer")
    read = partial(read_trace, path, format, block_tokens, _TOKEN_ID_BLOCK if case is None else step)
    if after and path == "-":
        raise UsageError(
            "--after: a share needs a file, because the length of a trace from stdin is not known", "use a file"
        )
    warm_up = int(after * sum(1 for _ in read())) if after else 0
    profiled = profile(read(), step, most_blocks, report, warm_up, optimal)
    setup = None
    if case is not None:
        notes += case.notes
        prefixes = prefixes_of(case)
        mean = profiled.stack.num_tokens // profiled.stack.num_requests
        block = block_bytes(case, prefixes, profiled.stack.block_tokens, mean, notes)
        setup = Setup(case, prefixes, block, _prefill_of(case, profiled, notes), prices, profiled)
    blocks = _sizes(sizes, profiled, setup)
    knee = profiled.stack.smallest(KNEE_SHARE)
    *curve, knee_row, unlimited = (
        describe_size(reuse, profiled, setup)
        for reuse in profiled.stack.at([*blocks, knee, profiled.stack.distinct_blocks])
    )
    tiers = [] if setup is None else describe_tiers(setup, offload, bandwidths or {}, notes)
    _add_notes(profiled, blocks, notes)
    if setup is not None and profiled.longest_prompt > (
        setup.case.spec.max_position_embeddings or profiled.longest_prompt
    ):
        limit = setup.case.spec.max_position_embeddings
        text = f"the longest prompt has {profiled.longest_prompt:,} tokens, but the model's limit is {limit:,}"
        notes.append(Note("trace", BEYOND_MODEL, text))
    return {
        "schema_version": SCHEMA_VERSION,
        "trace": describe_trace(profiled),
        "model": None if setup is None else describe_model(setup.case.spec),
        "engine": None if setup is None else describe_engine(setup),
        "hardware": None if setup is None or setup.gpu is None else describe_hardware(setup.case),
        "prefill": None if setup is None or setup.prefill is None else describe_prefill(setup, setup.prefill),
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


def _prefill_of(case: Case, profiled: Profile, notes: list[Note]) -> PrefillTime | None:
    """How long prefills take. None, with a note, if the speed is not known or there is no device."""
    if case.question.devices is None:
        return None
    from kvcalc.server.speed import speed_of

    speed = speed_of(case, notes)
    if isinstance(speed, str):
        notes.append(Note("throughput", "unknown", speed))
        return None
    fitted = prefill_time(speed.model, profiled.longest_prompt)
    if fitted.worst_error > _WORTH_A_NOTE:
        text = f"the prefill time of a single prompt is approximated within {fitted.worst_error:.0%}"
        notes.append(Note("throughput", "fitted-prefill", text))
    return fitted


def _sizes(sizes: Sizes, profiled: Profile, setup: Setup | None) -> list[int]:
    """The sizes of the curve, in blocks."""
    stack, unit = profiled.stack, 1 if setup is None else setup.block.of_replica
    if sizes.memory_bytes:
        return [size // unit for size in sizes.memory_bytes]
    if sizes.tokens:
        return [tokens // stack.block_tokens for tokens in sizes.tokens]
    size, blocks = 1, []
    while size < stack.largest_request * unit:
        size *= 2
    while size // unit < stack.distinct_blocks:
        blocks.append(size // unit)
        size *= 2
    return [*blocks, size // unit]


def _add_notes(profiled: Profile, blocks: Sequence[int], notes: list[Note]) -> None:
    trace, stack = profiled.trace, profiled.stack
    if trace.num_bad_rows:
        notes.append(Note("trace", BAD_ROWS, trace.bad_rows_text))
    if stack.sampling_rate < 1:
        text = f"one in {1 / stack.sampling_rate:.0f} blocks is sampled; the ranges hold 99% of the errors"
        notes.append(Note("curve", "sampled", text))
    if any(size < stack.largest_request for size in blocks):
        text = f"the largest prompt has {stack.largest_request:,} blocks; smaller caches cannot serve it"
        notes.append(Note("curve", "below-largest-request", text))
