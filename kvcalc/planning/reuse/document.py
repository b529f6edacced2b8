"""The `reuse` part of a document: what a shared prefix saves, and what the cache keeps of sessions between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.engines.prefixes import Prefixes
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.notes import Note
from kvcalc.planning.cases.case import Case
from kvcalc.planning.device.capacity import largest_batch
from kvcalc.planning.reuse import prompt_tokens_of, turns_of
from kvcalc.question.question import CacheReuse

if TYPE_CHECKING:
    from kvcalc.throughput.roofline import SpeedModel


def describe_reuse(
    case: Case, fit: dict[str, Any] | None, model: SpeedModel | None, notes: list[Note]
) -> dict[str, Any]:
    """The `reuse` part of a document. Bytes are those of one device unless a field says otherwise.

    `fit` is the document's part, `model` the speed if it is known. Raises what the engine's `prefixes` raises.
    """
    reuse = case.question.reuse or CacheReuse()
    described: dict[str, Any] = {"prefix": None, "sessions": None, "tiers": None}
    if reuse.prefix_tokens:
        described["prefix"] = _describe_prefix(case, reuse, fit)
    if reuse.turns:
        described["sessions"] = _describe_sessions(case, reuse, fit, model)
    if reuse.offload:
        from kvcalc.planning.reuse.tiers import describe_tiers

        described["tiers"] = describe_tiers(case, reuse, model, notes)
    return described


def _describe_prefix(case: Case, reuse: CacheReuse, fit: dict[str, Any] | None) -> dict[str, Any]:
    prefixes, workload, allocation = case.prefixes(), case.workload, case.allocation
    dtype, tokens, batch = workload.kv_dtype, workload.context_tokens, workload.attention_batch(workload.batch_size)
    prompt = prompt_tokens_of(case.question.speed, workload)
    found = prefixes.found(min(reuse.prefix_tokens, prompt - 1))
    held, more = (allocation.batch_bytes(case.share, dtype, tokens, number) for number in (batch, batch + 1))
    most = None if fit is None else fit["max_batch_size"]
    most_alone = _most_alone(case, fit)
    return {
        "prefix_tokens": reuse.prefix_tokens,
        "block_tokens": prefixes.block_tokens,
        "found_tokens": found,
        "shared_tokens": prefixes.shared(min(reuse.prefix_tokens, prompt - 1, tokens - 1)),
        "kept_bytes": prefixes.kept_bytes(found),
        "saved_bytes": allocation.alone().batch_bytes(case.share, dtype, tokens, batch) - held,
        "next_request_bytes": more - held,
        "max_batch_size_alone": most_alone,
        "more_requests": None if most is None or most_alone is None else most - most_alone,
    }


def _most_alone(case: Case, fit: dict[str, Any] | None) -> int | None:
    """The most sequences that fit if they share nothing. None if no memory is known, or if it sets no limit."""
    if fit is None:
        return None
    if case.allocation.alone() is case.allocation:
        most: int | None = fit["max_batch_size"]
        return most
    alone = case._replace(allocation=case.allocation.alone())
    if case.question.devices is None:
        return largest_batch(alone, fit["kv_cache_memory_bytes"], case.workload.context_tokens)
    from kvcalc.planning.device.budget import budget

    found = budget(alone)
    return None if isinstance(found, str) else found.running_limit()


def _describe_sessions(
    case: Case, reuse: CacheReuse, fit: dict[str, Any] | None, model: SpeedModel | None
) -> dict[str, Any]:
    prefixes, workload = case.prefixes(), case.workload
    prompt, replicas = prompt_tokens_of(case.question.speed, workload), workload.data_parallel_size
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
