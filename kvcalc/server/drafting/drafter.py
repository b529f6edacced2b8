"""The drafter of a case: the bytes of its weights, and its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.memory.sharding import shard
from kvcalc.memory.weights import plain_bytes, quantized_bytes
from kvcalc.model.drafting import DFLASH, DRAFT, Drafter, Speculation, reads_cache
from kvcalc.model.layout import Layout
from kvcalc.server.case import Case
from kvcalc.server.drafting import drafter_of
from kvcalc.server.weights import describe_weights, files_of, stored_weights

if TYPE_CHECKING:
    from kvcalc.throughput.roofline import SpeedModel
    from kvcalc.throughput.speed import StoredWeights


def speculation_of(case: Case) -> Speculation:
    """How the case drafts tokens. ValueError if it does not, so check `question.speculative` first."""
    if case.question.speculative is None:
        raise ValueError("this case drafts no tokens")
    return case.question.speculative


def draft_weights(case: Case) -> int | str:
    """Bytes of the weights that draft tokens, on the device that holds the most of them; or why they are not known."""
    drafter = drafter_of(speculation_of(case), case.spec, case.workload)
    if drafter is None:
        return 0
    stored = _stored(case, drafter)
    if isinstance(stored, str):
        return stored
    if drafter.like_model and _counts_files(case):
        # The size of the files includes the MTP layers, because no tensor's name tells them apart.
        return 0
    held = drafter.held
    if held is None:
        return f"the weights of {case.spec.name} are not known"
    mine = shard(held, Layout(case.layout.tensor_parallel_size))
    if stored.scheme is not None:
        return quantized_bytes(mine, stored.base, stored.scheme)[0]
    return plain_bytes(mine, stored.base, stored.linear)[0]


def key_of(speculation: Speculation) -> tuple[object, ...]:
    """The key of the speed of this way to draft tokens.

    A draft model is compared by identity. `drafter_of` remembers it for as long as speeds are remembered.
    """
    return speculation.method, speculation.num_tokens, speculation.acceptance_length, id(speculation.draft_model)


def speed_of_drafting(case: Case, target: SpeedModel) -> SpeedModel | str:
    """The speed with drafted tokens, from the speed of the model alone; or the reason if it is not known."""
    from kvcalc.throughput.counts import count
    from kvcalc.throughput.drafting import BETWEEN_SECONDS, DraftingModel, drafter_model

    speculation, workload, model = speculation_of(case), case.workload, None
    drafter = drafter_of(speculation, case.spec, workload)
    if drafter is not None:
        placement = case.engine.placement
        if placement is not None and not placement.kv_offload:
            return "the speed of drafts whose cache is in host memory (--no-kv-offload) is not modelled"
        if reads_cache(drafter.spec):
            return "the speed of a drafter that reads the model's cache is not modelled"
        stored = _stored(case, drafter)
        if isinstance(stored, str):
            return stored
        how = (stored.linear, stored.scheme)
        reads = case.reads(case.spec.num_layers, drafter.spec.num_layers)
        counts = count(drafter.spec, stored.weights, stored.base, reads, target.layout, *how)
        model = drafter_model(target, counts)
    schedule = case.engine.schedule()
    between = BETWEEN_SECONDS if schedule is not None and schedule.overlaps else 0.0
    length = 1.0 if speculation.acceptance_length is None else float(speculation.acceptance_length)
    return DraftingModel(
        target, model, speculation.num_tokens, length,
        starts_with_accepted=speculation.method != DRAFT, in_one_pass=speculation.method == DFLASH,
        between_seconds=between,
    )  # fmt: skip


def _stored(case: Case, drafter: Drafter) -> StoredWeights | str:
    """The weights of one pass of the drafter and how they are stored; or why they are not known.

    MTP layers are stored like the model, and a draft model as its own config says. `--dtype` applies to both. An EAGLE
    or DFlash head has 16 or 32 bits: it is published apart from the model.
    """
    question, workload = case.question, case.workload
    if drafter.is_model:
        dtype, _ = case.engine_class.weight_dtype(drafter.spec, question.dtype)
        return stored_weights(drafter.spec, drafter.spec, dtype, workload.model_dtype)
    weights = stored_weights(case.model, case.spec, question.dtype, workload.model_dtype)
    if isinstance(weights, str):
        return weights
    if drafter.read is None:
        return f"the weights of {case.spec.name} are not known"
    weights = weights._replace(weights=drafter.read)
    return weights if drafter.like_model else weights._replace(linear=None, scheme=None, name=workload.model_dtype.name)


def _counts_files(case: Case) -> bool:
    """Whether the bytes of the model's weights are those of its files, with the MTP layers."""
    files = files_of(case.model)
    if files is None or files.draft_bytes:
        return False
    described = describe_weights(case.model, case.spec, case.question.dtype, case.workload.model_dtype, [])
    return bool(described["bytes_source"] == "safetensors")
