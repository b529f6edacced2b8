"""The `speculative` part of a document: the cost and the gain of drafting, and the break-even batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.server.case import Case, make_case
from kvcalc.server.drafting import describe_asked, slots_of
from kvcalc.server.drafting.drafter import draft_weights, speculation_of

if TYPE_CHECKING:
    import kvcalc.documents as documents


def describe_speculative(case: Case, served: Case | None) -> documents.Speculative:
    """The `speculative` part of a document. Bytes are null if the weights are not known.

    Seconds are those of `served`, the case whose speed is described. They are null if it is None.
    """
    speculation, added = speculation_of(case), case.cached.num_layers - case.spec.num_layers
    weights = draft_weights(case)
    described: documents.Speculative = {
        **describe_asked(speculation),
        "num_layers": added,
        "first_layer": case.cached.first_draft_layer if added else None,
        "lookahead_tokens": slots_of(speculation, case.engine, case.question.serves_requests),
        "weights_bytes": weights if isinstance(weights, int) else None,
        "cache_bytes": _added_cache(case),
        "verify_seconds": None,
        "draft_seconds": None,
        "seconds_without_drafting": None,
        "speedup": None,
        "break_even_batch": None,
    }
    if served is None:
        return described
    from kvcalc.server.speed import speed_of
    from kvcalc.throughput.drafting import DraftingModel

    speed = speed_of(served, [])
    if isinstance(speed, str) or not isinstance(speed.model, DraftingModel):
        return described
    model, here = speed.model, (served.workload.batch_size, served.workload.context_tokens)
    return {
        **described,
        "verify_seconds": model.verify(*here).seconds,
        "draft_seconds": model.draft(*here).seconds,
        "seconds_without_drafting": model.target.decode(*here).seconds,
        "speedup": model.speedup(*here),
        "break_even_batch": model.break_even_batch(here[1]),
    }


def _added_cache(case: Case) -> int:
    """Bytes that drafting adds to the cache of the batch on one device: its layers, its states and its slots."""
    workload = case.workload
    without_drafts = case.question._replace(
        speculative=None, speed=None, context_tokens=workload.context_tokens, batch_size=workload.batch_size
    )
    plain = make_case(without_drafts)
    sizes = (workload.kv_dtype, workload.context_tokens, workload.batch_size)
    return case.allocation.batch_bytes(case.share, *sizes) - plain.allocation.batch_bytes(plain.share, *sizes)
