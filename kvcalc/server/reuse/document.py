"""The `reuse` part of a document: what a shared prefix saves, and what the cache keeps of sessions between turns.

Tiers of memory keep what a device's cache drops: the document says how much, and when loading pays. The size of a tier
is that of one replica, over all its devices. Host memory is read over the link of every device at once; a disk or
another machine is one link for all devices. The rules of each engine are in `Engine.reuse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class
from kvcalc.engines.prefixes import Prefixes
from kvcalc.engines.reuse import CPU
from kvcalc.engines.rounding import round_up
from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.notes import Note
from kvcalc.question.question import CacheReuse
from kvcalc.records import NamedTuple
from kvcalc.server.capacity import largest_batch
from kvcalc.server.case import Case
from kvcalc.server.reuse import (
    Tier,
    break_even_tokens,
    contexts_kept,
    longest_kept,
    prompt_tokens_of,
    tier_rate,
    tokens_kept,
    turns_of,
)

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.roofline import SpeedModel


def describe_reuse(
    case: Case, reuse: CacheReuse, fit: documents.Fit | None, model: SpeedModel | None, notes: list[Note]
) -> documents.Reuse:
    """The `reuse` part of a document. Bytes are those of one device unless a field says otherwise.

    `reuse` is what the question asks for, `fit` the document's part, and `model` the speed if it is known. Raises what
    the engine's `prefixes` raises.
    """
    described: documents.Reuse = {"prefix": None, "sessions": None, "tiers": None}
    if reuse.prefix_tokens:
        described["prefix"] = _describe_prefix(case, reuse, fit)
    if reuse.turns:
        described["sessions"] = _describe_sessions(case, reuse, fit, model)
    if reuse.offload:
        described["tiers"] = describe_tiers(case, reuse, model, notes)
    return described


def _describe_prefix(case: Case, reuse: CacheReuse, fit: documents.Fit | None) -> documents.ReusePrefix:
    prefixes, workload, allocation = case.prefixes(), case.workload, case.allocation
    dtype, tokens, batch = workload.kv_dtype, workload.context_tokens, workload.attention_batch
    common = min(reuse.prefix_tokens, prompt_tokens_of(case.question.speed, workload) - 1)
    tokens_found = prefixes.found(common)
    held, more = (allocation.batch_bytes(case.share, dtype, tokens, number) for number in (batch, batch + 1))
    most = None if fit is None else fit["max_batch_size"]
    most_alone = _most_alone(case, fit)
    return {
        "prefix_tokens": reuse.prefix_tokens,
        "block_tokens": prefixes.block_tokens,
        "found_tokens": tokens_found,
        "shared_tokens": prefixes.shared(common),
        "kept_bytes": prefixes.kept_bytes(tokens_found),
        "saved_bytes": allocation.alone().batch_bytes(case.share, dtype, tokens, batch) - held,
        "next_request_bytes": more - held,
        "max_batch_size_alone": most_alone,
        "more_requests": None if most is None or most_alone is None else most - most_alone,
    }


def _most_alone(case: Case, fit: documents.Fit | None) -> int | None:
    """The most sequences that fit if they share nothing. None if no memory is known, or if it sets no limit."""
    if fit is None:
        return None
    if case.allocation.alone() is case.allocation:
        most: int | None = fit["max_batch_size"]
        return most
    alone = case._replace(allocation=case.allocation.alone())
    if case.question.devices is None:
        return largest_batch(alone, fit["kv_cache_memory_bytes"], case.workload.context_tokens)
    from kvcalc.server.budget import budget

    room = budget(alone)
    return None if isinstance(room, str) else room.running_limit()


def _describe_sessions(
    case: Case, reuse: CacheReuse, fit: documents.Fit | None, model: SpeedModel | None
) -> documents.ReuseSessions:
    prefixes, workload = case.prefixes(), case.workload
    prompt, replicas = prompt_tokens_of(case.question.speed, workload), workload.layout.data_parallel_size
    turns = turns_of(reuse, prompt, workload.context_tokens, prefixes)
    idle = prefixes.found(turns[-2].end_tokens)
    shared = prefixes.shared(min(reuse.prefix_tokens, idle))
    last = turns[-1]
    kept = beside = None
    if fit is not None:
        memory = fit["kv_cache_memory_bytes"]
        kept = _most_idle(prefixes, shared, idle, memory)
        free = memory - fit["kv_cache_bytes"] + prefixes.idle_bytes(shared, idle, 0)
        beside = _most_idle(prefixes, shared, idle, free)
    return {
        "turns": len(turns),
        "idle_tokens": idle,
        "idle_session_bytes": prefixes.kept_bytes(idle, shared),
        "kept_sessions": None if kept is None else kept * replicas,
        "kept_sessions_beside_batch": None if beside is None else beside * replicas,
        "reused_tokens": last.reused_tokens,
        "computed_tokens": last.prompt_tokens - last.reused_tokens,
        "reuse_rate": sum(turn.reused_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns),
        "prefill_seconds": None if model is None else model.prefill(last.prompt_tokens, 1, last.reused_tokens).seconds,
        "prefill_seconds_alone": None if model is None else model.prefill(last.prompt_tokens).seconds,
        "rows": [
            {
                "turn": number,
                "prompt_tokens": turn.prompt_tokens,
                "reused_tokens": turn.reused_tokens,
                "computed_tokens": turn.prompt_tokens - turn.reused_tokens,
                "end_tokens": turn.end_tokens,
                "idle_bytes": prefixes.kept_bytes(
                    prefixes.found(turn.end_tokens),
                    min(shared, prefixes.found(turn.end_tokens)),
                ),
            }
            for number, turn in enumerate(turns, 1)
        ],
    }


def _most_idle(prefixes: Prefixes, shared: int, tokens: int, memory_bytes: int) -> int | None:
    """The most idle sessions that the memory keeps. None if they take nothing."""
    each = prefixes.kept_bytes(tokens, shared)
    if not each:
        return None
    most = max(memory_bytes, 0) // each + 1
    return most_that_fit(lambda count: prefixes.idle_bytes(shared, tokens, count), memory_bytes, most)


class Store(NamedTuple):
    """How contexts are kept outside the device.

    `copies` are the devices whose bytes are all kept. The bytes of a unit are rounded up to a multiple of `page_bytes`.
    """

    prefixes: Prefixes
    copies: int
    page_bytes: int

    @property
    def unit_tokens(self) -> int:
        """The tokens that are kept and moved as a whole."""
        return self.prefixes.block_tokens

    def found(self, tokens: int) -> int:
        """The tokens that a tier keeps of a context of `tokens` tokens."""
        return tokens // self.unit_tokens * self.unit_tokens

    @property
    def unit_bytes(self) -> int:
        """The bytes of a tier that a unit takes, of all devices."""
        of_unit = self.tier_bytes(self.unit_tokens)
        return self.tier_bytes(2 * self.unit_tokens) - of_unit if self.prefixes.confirming_tokens else of_unit

    def tier_bytes(self, tokens: int, after: int = 0) -> int:
        """The bytes of a tier that keeps a context, of all devices, without its first `after` tokens."""
        held, unit = self.prefixes.tier_bytes(tokens, after), self.prefixes.unit_bytes
        if self.page_bytes > 1:
            return held // unit * round_up(unit * self.copies, self.page_bytes)
        return self.copies * held


def describe_tiers(case: Case, reuse: CacheReuse, model: SpeedModel | None, notes: list[Note]) -> documents.ReuseTiers:
    """The `tiers` part. Seconds are null if the speed or a link's rate is not known.

    Raises UsageError (exit 2) for a tier that the engine does not have, and ModelError (exit 3) if how it divides the
    memory is not modelled.
    """
    store = _checked_store(case, reuse)
    tokens = store.found(_session_tokens(case, reuse, store.prefixes))
    if not tokens:
        raise UsageError(
            f"--offload: a context of {case.workload.context_tokens:,} tokens is shorter than the "
            f"{store.unit_tokens:,} that are kept as a whole", "use a longer --context",
        )  # fmt: skip
    # Units are found by their contents, so a tier keeps a common prefix once too.
    shared = store.found(store.prefixes.shared(min(reuse.prefix_tokens, tokens - 1)))
    gpu = None if case.question.devices is None else case.question.devices.gpu
    given = dict(reuse.bandwidths)
    tiers = [Tier(name, size, tier_rate(name, gpu, given, notes, "reuse")) for name, size in reuse.offload]
    limit = max(case.spec.max_position_embeddings or 0, case.workload.context_tokens)
    return {
        "unit_tokens": store.unit_tokens,
        "unit_bytes": store.unit_bytes,
        "session_tokens": tokens,
        "prefix_bytes": store.tier_bytes(shared),
        "session_bytes": store.tier_bytes(tokens, shared),
        "loaded_bytes_per_device": store.prefixes.loaded_bytes(tokens),
        "prefill_seconds": None if model is None else _computed_again(model, tokens),
        "rows": [_describe_tier(tier, store, (shared, tokens), model, limit) for tier in tiers],
    }


def store_of(case: Case) -> Store:
    """How the case's engine keeps contexts outside the device, for one pipeline stage."""
    reuse = case.engine_class.reuse()
    copies = reuse.tier_copies(case.spec, case.share, case.layout.tensor_parallel_size)
    return Store(case.prefixes(), copies, reuse.tier_page_bytes)


def check_engine_tiers(name: str, offload: Sequence[tuple[str, int]]) -> None:
    """Raise UsageError (exit 2) for a tier that the engine `name` does not have."""
    known = engine_class(name).reuse().tiers
    unknown = [tier for tier, _ in offload if tier not in known]
    if unknown:
        hint = f"one of {', '.join(known)}" if known else "use vllm, sglang, tensorrt-llm or llama.cpp"
        raise UsageError(f"--offload {unknown[0]}: {name} has no such tier", hint)


def _session_tokens(case: Case, reuse: CacheReuse, prefixes: Prefixes) -> int:
    """The tokens that a later turn finds of a session: before the last turn, or of the whole context without turns."""
    workload = case.workload
    tokens = workload.context_tokens
    if not reuse.turns:
        return prefixes.found(tokens)
    prompt = prompt_tokens_of(case.question.speed, workload)
    return prefixes.found(turns_of(reuse, prompt, tokens, prefixes)[-2].end_tokens)


def _checked_store(case: Case, reuse: CacheReuse) -> Store:
    store, workload = store_of(case), case.workload
    if workload.layout.pipeline_parallel_size * workload.layout.attention_copies * case.engine.token_ranks > 1:
        raise LayoutError("--offload is modelled for one DP rank without stages", "split the model with --tp")
    check_engine_tiers(case.engine.name, reuse.offload)
    return store


def _describe_tier(
    tier: Tier, store: Store, lengths: tuple[int, int], model: SpeedModel | None, limit: int
) -> documents.ReuseTier:
    """A row of the table. `lengths` are the tokens of the common prefix, and those of a context."""
    rate, unit, (shared, tokens) = tier.bytes_per_second, store.unit_tokens, lengths
    left = tier.memory_bytes - store.tier_bytes(shared)

    load_seconds = break_even = None
    if rate is not None:
        # Every device has its own link to host memory. A disk or a network is one link for all copies.
        copies = 1 if tier.name == CPU else store.copies

        def load(count: int) -> float:
            return store.prefixes.loaded_bytes(store.found(count)) * copies / rate

        load_seconds = load(tokens)
        if model is not None:
            speed = model
            break_even = break_even_tokens(load, lambda count: _computed_again(speed, count), unit, limit)
    return {
        "name": cast(Any, tier.name),
        "memory_bytes": tier.memory_bytes,
        "bandwidth_bytes_per_second": rate,
        "sessions": contexts_kept(left, store.tier_bytes(tokens, shared)),
        "tokens": _tokens_kept(tier.memory_bytes, store, shared, tokens),
        "load_seconds": load_seconds,
        "break_even_tokens": break_even,
    }


def _tokens_kept(memory_bytes: int, store: Store, shared: int, tokens: int) -> int | None:
    """The tokens in a tier: those of the common prefix, and those after it of every context."""
    left = memory_bytes - store.tier_bytes(shared)
    if left < 0:
        return longest_kept(memory_bytes, store.tier_bytes, shared, store.unit_tokens)
    on_device = tokens_kept(
        left, lambda count: store.tier_bytes(shared + count, shared), tokens - shared, store.unit_tokens
    )
    return None if on_device is None else shared + on_device


def _computed_again(model: SpeedModel, tokens: int) -> float:
    """The seconds of a prefill that `tokens` tokens add to that of the last token, which is always computed."""
    return model.prefill(tokens + 1).seconds - model.prefill(tokens + 1, 1, tokens).seconds
