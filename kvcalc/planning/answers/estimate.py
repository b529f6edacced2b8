"""Compute the size of the cache of one model, workload and engine, also with MHA, MQA, GQA and MLA instead."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import KvcalcError, ModelError
from kvcalc.memory import kv_cache
from kvcalc.memory.curves import stored_sequence_bytes
from kvcalc.memory.workload import Workload, bind_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf, layer_parameters, side_by_side
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.figures import CacheFigures, cache_figures, describe_formulas
from kvcalc.question.question import CacheReuse, Question
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.capacity import capacity
from kvcalc.server.case import Case, make_case
from kvcalc.server.weights import describe_weights

if TYPE_CHECKING:
    import kvcalc.documents as documents


class Answer(NamedTuple):
    """The estimate document and its warnings as notes."""

    document: documents.Estimate
    notes: tuple[Note, ...]

    @property
    def fit(self) -> documents.Fit:
        """The `fit` part of the document. Raises what `fit_of` raises."""
        return fit_of(self.document)


def fit_of(document: documents.Estimate) -> documents.Fit:
    """The `fit` part of the document. ModelError (exit 3) if it is not known."""
    fit = document["fit"]
    if fit is None:
        reason = next((note["text"] for note in document["warnings"] if note["part"] == "fit"), "not known")
        raise ModelError(reason, "kvcalc estimate --kv-memory SIZE checks the cache alone")
    return fit


def answer(question: Question) -> Answer:
    """The estimate of a question: the exact bytes of the cache, whether it fits, and how fast it runs.

    Raises what `make_case` raises.
    """
    return answer_asked(make_case(question))


def answer_asked(case: Case) -> Answer:
    """The estimate of a case from `make_case`. With requests to serve, the batch is the number that fits."""
    if case.question.devices is not None:
        from kvcalc.planning.answers.load import at_load

        case = at_load(case)
    return answer_case(case)


def answer_case(case: Case) -> Answer:
    """The estimate of a case whose batch is final."""
    workload, kv_memory_bytes = case.workload, case.question.kv_memory_bytes
    notes = list(case.notes)
    weights = describe_weights(case.model, case.spec, case.question.dtype, workload.model_dtype, notes)
    fit = hardware = throughput = served = None
    division: dict[str, object] = {}
    if case.question.devices is None:
        if kv_memory_bytes is not None:
            fit = capacity(case, kv_memory_bytes, notes)
    else:
        from kvcalc.planning.answers.gpus import describe_hardware
        from kvcalc.planning.answers.throughput import describe_throughput
        from kvcalc.server.budget import budget
        from kvcalc.server.fit import describe_fit

        hardware = describe_hardware(case)
        room = budget(case)
        if isinstance(room, str):
            notes.append(Note("fit", "unknown", room))
        else:
            fit = describe_fit(room, notes)
            division, kv_memory_bytes = room.reserve.settings, max(room.offered_bytes, 0)
            # What does not fit does not run, so it has no speed.
            served = case if fit["fits"] else None
            throughput = None if served is None else describe_throughput(served, notes)
            if fit["max_batch_size"] == 0:
                from kvcalc.planning.answers.load import larger_share_notes

                notes += larger_share_notes(case)
    speculative = None
    if case.question.speculative is not None:
        from kvcalc.planning.answers.speculative import describe_speculative

        speculative = describe_speculative(case, served)
    figures = cache_figures(case)
    document: documents.Estimate = {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(case.spec),
        "workload": _describe_workload(case),
        "engine": _describe_engine(case, division, kv_memory_bytes),
        "kv_cache": _describe_cache(case, figures),
        "variants": _describe_variants(case, figures),
        "weights": weights,
        "hardware": hardware,
        "fit": fit,
        "server": None,
        "throughput": throughput,
        "speculative": speculative,
        "warnings": describe_notes(notes),
    }
    if case.question.reuse is not None:
        _add_reuse(case, case.question.reuse, served or case, document, notes)
    return Answer(document, tuple(notes))


def _add_reuse(
    case: Case, reuse: CacheReuse, served: Case, document: documents.Estimate, notes: list[Note]
) -> None:  # fmt: skip
    """Add the parts about a cache that is used again. Seconds are those of `served`."""
    from kvcalc.server.reuse.document import describe_reuse

    model, throughput = None, document["throughput"]
    if throughput is not None:
        from kvcalc.server.speed import speed_of

        speed = speed_of(served, [])
        model = None if isinstance(speed, str) else speed.model
    document["reuse"] = describe_reuse(case, reuse, document["fit"], model, notes)
    if throughput is not None and reuse.transfer is not None:
        from kvcalc.server.transfer import describe_transfer

        serving = throughput["serving"]
        throughput["kv_transfer"] = describe_transfer(case, None if serving is None else serving["ttft_seconds"])
    document["warnings"] = describe_notes(notes)


def _describe_workload(case: Case) -> documents.Workload:
    workload, speed = case.workload, case.question.speed
    requests = None if speed is None or speed.request_tokens is None else speed
    hits = speed.prefix_hit_rate if speed is not None and speed.prefix_hit_rate else None
    images = None
    if case.question.images is not None:
        from kvcalc.server.images import describe_images

        loads_tower = "language-model-only" not in case.settings
        step = case.engine.settings.get("max_num_batched_tokens") if loads_tower else None
        tokens = step if isinstance(step, int) else None
        images = describe_images(
            case.question.images, case.model, workload.context_tokens, tokens, workload.model_dtype.block_bytes
        )
    return {
        "context_tokens": workload.context_tokens,
        "batch_size": workload.batch_size,
        "encoder_tokens": workload.encoder_tokens,
        "input_tokens": None if requests is None else requests.prompt_tokens,
        "output_tokens": None if requests is None else requests.answer_tokens,
        "concurrency": None if requests is None else requests.concurrency,
        "prefix_hit_rate": hits,
        "images": images,
    }


def _describe_cache(case: Case, figures: CacheFigures) -> documents.KvCache:
    workload = case.workload
    tokens, batch, dtype = workload.context_tokens, workload.batch_size, workload.kv_dtype
    rows = kv_cache.cache_rows(case.cached, dtype, tokens, case.allocation.cache_bytes)
    layers = [
        {"first": first, "last": last, "kind": cache.kind, "window": cache.window, "bytes_per_layer": size}
        for first, last, cache, size in rows
    ]
    formulas = describe_formulas(case.cached, tokens, batch, dtype)
    return cast("documents.KvCache", {"dtype": dtype.name, **figures._asdict(), "formulas": formulas, "layers": layers})


def _describe_engine(case: Case, division: Mapping[str, object], memory: int | None) -> documents.Engine:
    """The engine, with its settings and how it divides the memory; and its blocks for one device if it has a pool."""
    engine, workload, allocation = case.engine, case.workload, case.allocation
    dtype, tokens, batch = workload.kv_dtype, workload.context_tokens, workload.attention_batch
    device = allocation.largest_stage(case.share, dtype, tokens, batch)
    figures = allocation.blocks(device, dtype, tokens, batch, memory)
    pool = figures.pool
    if pool is not None and pool.max_concurrency is not None and case.engine_class.limits_concurrency:
        most = allocation.max_running_requests(case.share, dtype, memory)
        if most is not None:
            pool = pool._replace(max_concurrency=min(pool.max_concurrency, float(most)))
    found = figures._replace(pool=pool).describe()
    accounts = {
        "request_lines": allocation.lines(device, dtype, tokens),
        "pool_lines": allocation.pool(device, dtype, tokens, batch),
    }
    for name, lines in accounts.items():
        if lines is not None:
            found[name] = [{"name": part, "bytes": size} for part, size in lines]
    described = {
        "name": engine.name,
        "version": engine.version,
        **workload.layout.describe(),
        "kv_dtype_reason": case.kv_dtype_reason,
        **engine.settings,
        **division,
        "device_defaults": case.device_defaults,
        **found,
    }
    return cast("documents.Engine", described)


def _describe_variants(case: Case, figures: CacheFigures) -> list[documents.Variant]:
    """The four kinds of attention side by side. The row of the what-if's kind shows the what-if.

    `figures` are those of the case, whose cache is one of them.
    """
    model = bind_workload(case.model, case.workload)
    rows = _variants_of(model, case.question.what_if, case.question.speculative is not None)
    mha, mha_bytes = rows[0].spec, 0
    with suppress(KvcalcError):  # MHA may not be possible in this dtype
        mha_bytes = 0 if mha is None else _variant_bytes(mha, case.workload)
    return [_describe_variant(row, mha_bytes, case, figures) for row in rows]


def _variant_bytes(spec: ModelSpec, workload: Workload) -> int:
    return stored_sequence_bytes(spec, workload.kv_dtype, workload.context_tokens)


class _Variant(NamedTuple):
    """A variant of a model alone, without what drafts tokens, and its row without bytes.

    `spec` is None if the model has no such variant.
    """

    spec: ModelSpec | None
    row: documents.Variant


@remembered
def _variants_of(model: ModelSpec, what_if: WhatIf, drafts: bool) -> list[_Variant]:
    """The variants of a model, MHA first. `drafts` is whether tokens are drafted."""
    return [
        _Variant(None, _refused(kind, spec)) if isinstance(spec, str) else _variant(kind, spec, model, drafts)
        for kind, spec in side_by_side(model, what_if)
    ]


def _variant(kind: str, spec: ModelSpec, model: ModelSpec, drafts: bool) -> _Variant:
    shape, is_own = spec.attention, kind == model.attention.kind and spec.layers == model.layers
    if drafts:
        from kvcalc.model.drafting import with_drafter

        spec = with_drafter(spec, None)
    row = _refused(kind, None)
    row.update({
        "own": is_own,
        "num_kv_heads": None if shape.is_latent else shape.num_kv_heads,
        "kv_lora_rank": shape.kv_lora_rank or None,
        "qk_rope_head_dim": shape.qk_rope_head_dim or None,
        "attention_parameters_per_layer": layer_parameters(spec),
    })  # fmt: skip
    return _Variant(spec, row)


def _describe_variant(variant: _Variant, mha_bytes: int, case: Case, figures: CacheFigures) -> documents.Variant:
    spec, row = variant.spec, variant.row.copy()
    if spec is None:
        return row
    workload, allocation = case.workload, case.allocation
    if spec is case.cached and workload.layout.data_parallel_size == 1:
        row["bytes_per_token"], row["total_bytes"] = figures.bytes_per_token, figures.total_bytes
        stored = figures.stored_bytes // workload.batch_size
        row["ratio_to_mha"] = stored / mha_bytes if mha_bytes else None
        return row
    dtype, tokens = workload.kv_dtype, workload.context_tokens
    try:
        row["bytes_per_token"] = allocation.growth(spec, dtype, tokens).bytes_per_token
        row["total_bytes"] = allocation.replica_bytes(spec, dtype, tokens, workload.batch_size)
    except KvcalcError as error:
        # A variant may be invalid for the dtype or the engine. The model itself is still answered.
        return _refused(row["attention"], error.message)
    row["ratio_to_mha"] = _variant_bytes(spec, workload) / mha_bytes if mha_bytes else None
    return row


def _refused(kind: str, reason: str | None) -> documents.Variant:
    """A row without figures."""
    return {
        "attention": cast(Any, kind), "own": False, "num_kv_heads": None, "kv_lora_rank": None,
        "qk_rope_head_dim": None, "bytes_per_token": None, "total_bytes": None, "ratio_to_mha": None,
        "attention_parameters_per_layer": None, "reason": reason,
    }  # fmt: skip
