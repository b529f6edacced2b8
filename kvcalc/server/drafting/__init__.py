"""Drafted tokens (speculative decoding) in a case: the check, the engine's settings, and the layers.

Everything here is called only if the question drafts tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class
from kvcalc.engines.engine import Engine
from kvcalc.engines.prefixes import Matching
from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.workload import Workload, bind_workload, check_tensor_parallel
from kvcalc.model import drafting
from kvcalc.model.drafting import (
    DFLASH,
    DRAFT,
    EAGLE,
    EAGLE1,
    METHODS,
    MOST_TOKENS,
    NGRAM,
    WITH_DRAFT_MODEL,
    Drafter,
    Speculation,
)
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.question.question import CacheReuse
from kvcalc.releases import release_of

if TYPE_CHECKING:
    import kvcalc.documents as documents

_EXAMPLE = "for example --speculative mtp:3 --acceptance-length 2.4"
OF_THE_MODEL_ALONE = (
    "max-running-requests", "max-mamba-cache-size", "speculative-num-draft-tokens", "n-gpu-layers", "n-cpu-moe",
    "cpu-moe", "host-memory", "host-bandwidth",
)  # fmt: skip
"""Settings that do not count for the model that drafts: it shares the request table, and checks no drafts.

llama.cpp places it by options of its own, and puts all of it on the device by default. Only --no-kv-offload counts for
both (load_model in tools/server/server-context.cpp: params_dft).
"""


def check_speculation(speculation: Speculation, has_device: bool) -> None:
    """Raise UsageError (exit 2) if a value is missing or out of range."""
    if speculation.method not in METHODS:
        raise UsageError(f"--speculative {speculation}: not a method", f"one of {', '.join(METHODS)}; {_EXAMPLE}")
    if not 1 <= speculation.num_tokens <= MOST_TOKENS:
        hint = "leave --speculative out to draft no tokens" if speculation.num_tokens < 1 else _EXAMPLE
        raise UsageError(f"--speculative {speculation}: the number of tokens must be from 1 to {MOST_TOKENS}", hint)
    length, most = speculation.acceptance_length, speculation.num_tokens + 1
    if length is None and has_device:
        raise UsageError(
            f"--speculative {speculation}: the speed depends on how many tokens are accepted",
            "give the mean number of tokens per step, which engines print: --acceptance-length 2.4",
        )
    if length is not None and not 1 <= length <= most:
        raise UsageError(
            f"--acceptance-length {length:g}: must be from 1 to {most}",
            f"a step gives 1 token, plus at most the {speculation.num_tokens} drafted ones",
        )
    if speculation.method in (DRAFT, DFLASH) and speculation.draft_model is None:
        raise UsageError(f"--speculative {speculation}: the draft model is missing", "--draft-model MODEL")
    if speculation.method not in WITH_DRAFT_MODEL and speculation.draft_model is not None:
        raise UsageError(
            f"--draft-model {speculation.draft_model.name}: {speculation.method} has no draft model",
            f"use --speculative draft:{speculation.num_tokens}",
        )


def matching_of(speculation: Speculation, engine: str, spec: ModelSpec, reuse: CacheReuse) -> Matching:
    """The prefixes that an engine finds while it drafts. UsageError (exit 2) if that is not known for the method."""
    moved = "--offload" if reuse.offload else "" if reuse.transfer is None else "--transfer-bandwidth"
    return engine_class(engine).reuse().matching(speculation, spec, release_of(engine), moved)


def drafter_of(speculation: Speculation, spec: ModelSpec, workload: Workload) -> Drafter | None:
    """What drafts tokens for `spec`, which is bound to `workload`. None for n-grams."""
    model = None if speculation.draft_model is None else bind_workload(speculation.draft_model, workload)
    return drafting.drafter_of(spec, model, speculation.method)


def with_layers(speculation: Speculation, spec: ModelSpec, workload: Workload) -> ModelSpec:
    """`spec` with the layers that draft tokens. Raises UsageError (exit 2) if this is not possible or not modelled."""
    drafter = drafter_of(speculation, spec, workload)
    if workload.layout.pipeline_parallel_size > 1:
        raise LayoutError(
            f"--pp {workload.layout.pipeline_parallel_size}: drafted tokens are not modelled with pipeline stages",
            "use --tp to split the model, or leave --speculative out",
        )
    if drafter is not None:
        check_tensor_parallel(drafter.spec, workload.layout.tensor_parallel_size)
    return drafting.with_drafter(spec, drafter)


def has_own_pool(engine: str, drafter: Drafter | None) -> bool:
    """Whether what drafts tokens has a pool of its own. MTP layers are in the model's own cache."""
    if drafter is None or drafter.like_model or engine_class(engine).joins_drafts:
        return False
    if drafting.reads_cache(drafter.spec) and not engine_class(engine).is_formula:
        raise UsageError(
            f"--draft-model {drafter.spec.name}: a drafter that reads the model's cache is not modelled for {engine}",
            "use --engine vllm",
        )
    return not drafting.reads_cache(drafter.spec)


def slots_of(speculation: Speculation, engine: Engine, serves_requests: bool) -> int:
    """The slots that a running request takes beyond its own tokens.

    Requests to serve may be shorter than the engine allows. Without them, the context is the longest request.
    """
    return engine.lookahead_tokens(
        speculation.num_tokens, is_longest=not serves_requests, by_ngrams=speculation.method == NGRAM
    )


def notes_of(speculation: Speculation, engine: str, spec: ModelSpec, settings: Mapping[str, str]) -> list[Note]:
    """What the engine does if it drafts, and what is assumed about an EAGLE head without a config."""
    notes = [*engine_class(engine).reuse().draft_notes(settings)]
    if speculation.method in (EAGLE, EAGLE1) and speculation.draft_model is None:
        text = f"the EAGLE head is assumed to be a layer like the last of {spec.name}; --draft-model reads its config"
        notes.append(Note("speculative", "assumed-head", text))
    return notes


def describe_asked(speculation: Speculation) -> documents.PlanSpeculative:
    """How tokens are drafted, as it was asked for."""
    return {
        "method": cast(Any, speculation.method),
        "num_draft_tokens": speculation.num_tokens,
        "acceptance_length": speculation.acceptance_length,
        "draft_model": None if speculation.draft_model is None else speculation.draft_model.name,
    }
