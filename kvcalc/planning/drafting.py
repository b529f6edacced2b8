"""Drafted tokens (speculative decoding) in a case: the settings, the layers, the weights, the speed, and the document.

Everything here is called only if the question drafts tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.engines import Engine
from kvcalc.memory.engines.draft_pool import JOINED, DraftPool
from kvcalc.memory.engines.lookahead import LookAhead, lookahead_tokens
from kvcalc.memory.sharding import shard
from kvcalc.memory.weights import plain_bytes, quantized_bytes
from kvcalc.memory.workload import Workload, bind_workload, check_tensor_parallel
from kvcalc.model.drafting import (
    DRAFT,
    EAGLE,
    METHODS,
    MOST_TOKENS,
    MTP,
    Drafter,
    Speculation,
    drafter_of,
    with_drafter,
)
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.drafting_flags import Drafting
from kvcalc.planning.weights import stored_weights

if TYPE_CHECKING:
    from kvcalc.planning.case import Case, Question
    from kvcalc.throughput.roofline import SpeedModel
    from kvcalc.throughput.speed import StoredWeights

_EXAMPLE = "for example --speculative mtp:3 --acceptance-length 2.4"
YOUR_HEAD = "<your EAGLE head>"
# vLLM's name for the number of drafted tokens, which its layout of recurrent states depends on.
_VLLM_SETTING = "num-speculative-tokens"


def check_speculation(asked: Speculation, has_device: bool) -> None:
    """Raise UsageError (exit 2) if a value is missing or out of range."""
    if asked.method not in METHODS:
        raise UsageError(f"--speculative {asked}: not a method", f"one of {', '.join(METHODS)}; {_EXAMPLE}")
    if not 1 <= asked.num_tokens <= MOST_TOKENS:
        hint = "leave --speculative out to draft no tokens" if asked.num_tokens < 1 else _EXAMPLE
        raise UsageError(f"--speculative {asked}: the number of tokens must be from 1 to {MOST_TOKENS}", hint)
    length, most = asked.acceptance_length, asked.num_tokens + 1
    if length is None and has_device:
        raise UsageError(
            f"--speculative {asked}: the speed depends on how many tokens are accepted",
            "give the mean number of tokens per step, which engines print: --acceptance-length 2.4",
        )
    if length is not None and not 1 <= length <= most:
        raise UsageError(
            f"--acceptance-length {length:g}: must be from 1 to {most}",
            f"a step gives 1 token, and at most the {asked.num_tokens} drafted ones in addition",
        )
    if asked.method == DRAFT and asked.draft_model is None:
        raise UsageError(f"--speculative {asked}: the draft model is missing", "--draft-model MODEL")
    if asked.method not in (DRAFT, EAGLE) and asked.draft_model is not None:
        raise UsageError(
            f"--draft-model {asked.draft_model.name}: {asked.method} has no draft model",
            f"use --speculative draft:{asked.num_tokens}",
        )


def engine_settings(question: Question, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engine's settings, with the number of drafted tokens for the engine that has such a setting."""
    asked = _speculation(question)
    check_speculation(asked, question.devices is not None)
    if question.engine.partition("@")[0] != "vllm":
        return settings
    given = settings.get(_VLLM_SETTING)
    if given not in (None, str(asked.num_tokens)):
        raise UsageError(f"--{_VLLM_SETTING} {given} contradicts --speculative {asked}", f"remove --{_VLLM_SETTING}")
    return {**settings, _VLLM_SETTING: str(asked.num_tokens)}


def with_layers(question: Question, spec: ModelSpec, workload: Workload) -> ModelSpec:
    """`spec` with the layers that draft tokens. Raises UsageError (exit 2) if this is not possible or not modelled."""
    drafter = _drafter(question, spec, workload)
    if workload.pipeline_parallel_size > 1:
        raise LayoutError(
            f"--pp {workload.pipeline_parallel_size}: drafted tokens are not modelled with pipeline stages",
            "use --tp to split the model, or leave --speculative out",
        )
    if drafter is not None:
        check_tensor_parallel(drafter.spec, workload.tensor_parallel_size)
    return with_drafter(spec, drafter)


def rules_of(
    question: Question, spec: ModelSpec, cached: ModelSpec, workload: Workload, load: Callable[[ModelSpec], Engine]
) -> Engine:
    """The engine's rules for `cached`, the model with the layers that draft tokens. `load` loads them for a model.

    MTP layers are in the model's own cache. Most engines give a draft model or an EAGLE head a cache of its own.
    """
    drafter = _drafter(question, spec, workload)
    if drafter is None or drafter.like_model or question.engine.partition("@")[0] in JOINED:
        rules = load(cached)
    else:
        rules = DraftPool(load(spec), load(drafter.spec), drafter.spec)
    slots = _slots(question, rules.name)
    return LookAhead(rules, slots) if slots else rules


def notes_of(question: Question, spec: ModelSpec) -> list[Note]:
    """What is assumed about an EAGLE head without a config."""
    asked = _speculation(question)
    if asked.method != EAGLE or asked.draft_model is not None:
        return []
    text = (
        f"the EAGLE head is assumed to be one layer like the last of {spec.name}; --draft-model PATH reads its config"
    )
    return [Note("speculative", "assumed-head", text)]


def draft_weights(case: Case) -> int | str:
    """Bytes of the weights that draft tokens, on the device that holds the most of them; or why they are not known."""
    drafter = _drafter(case.question, case.spec, case.workload)
    if drafter is None:
        return 0
    found = _stored(case, drafter)
    if isinstance(found, str):
        return found
    stored, _ = found
    if drafter.like_model and _comes_with_files(case):
        # The size of the files includes the MTP layers.
        return 0
    held = drafter.held
    if held is None:
        return f"the weights of {case.spec.name} are not known"
    mine = shard(held, case.workload.tensor_parallel_size)
    if stored.scheme is not None:
        return quantized_bytes(mine, stored.base, stored.scheme)[0]
    return plain_bytes(mine, stored.base, stored.linear)[0]


def key_of(asked: Speculation) -> tuple[object, ...]:
    """What distinguishes the speed of this way to draft tokens.

    A draft model is compared by identity. `drafter_of` remembers it for as long as speeds are remembered.
    """
    return asked.method, asked.num_tokens, asked.acceptance_length, id(asked.draft_model)


def speed_of_drafting(case: Case, target: SpeedModel, stored: StoredWeights) -> SpeedModel | str:
    """The speed with drafted tokens, from the speed of the model alone; or the reason if it is not known."""
    from kvcalc.throughput.counts import count
    from kvcalc.throughput.drafting import DraftingModel, drafter_model

    asked, workload = _speculation(case.question), case.workload
    drafter = _drafter(case.question, case.spec, workload)
    model = None
    if drafter is not None:
        found = _stored(case, drafter)
        if isinstance(found, str):
            return found
        stored, spec = found
        counts = count(
            spec, stored.weights, stored.base, workload.kv_dtype, target.layout, stored.linear, stored.scheme
        )  # fmt: skip
        model = drafter_model(target, counts, stored.name)
    length = 1.0 if asked.acceptance_length is None else float(asked.acceptance_length)
    return DraftingModel(target, model, asked.num_tokens, length, starts_with_accepted=asked.method != DRAFT)


def drafting_of(asked: Speculation | None) -> Drafting | None:
    """How a printed command drafts tokens, and the checkpoint it names for that if the model's own is not enough."""
    if asked is None:
        return None
    checkpoint = YOUR_HEAD if asked.method == EAGLE else None
    if asked.draft_model is not None:
        from kvcalc.planning.checkpoint import checkpoint_of

        checkpoint = checkpoint_of(asked.draft_model).name
    return Drafting(asked.method, asked.num_tokens, checkpoint)


def describe_asked(asked: Speculation) -> dict[str, Any]:
    """How tokens are drafted, as it was asked for."""
    return {
        "method": asked.method,
        "num_draft_tokens": asked.num_tokens,
        "acceptance_length": asked.acceptance_length,
        "draft_model": None if asked.draft_model is None else asked.draft_model.name,
    }


def describe_speculative(case: Case, has_speed: bool) -> dict[str, Any]:
    """The `speculative` part of a document. Seconds are null without a device, bytes if the weights are not known."""
    asked, first = _speculation(case.question), case.cached.first_draft_layer
    added = case.cached.num_layers - case.spec.num_layers
    weights = draft_weights(case)
    described: dict[str, Any] = {
        **describe_asked(asked),
        "num_layers": added,
        "first_layer": first if added else None,
        "lookahead_tokens": _slots(case.question, case.rules.name),
        "weights_bytes": weights if isinstance(weights, int) else None,
        "cache_bytes": _added_cache(case),
        **dict.fromkeys(("verify_seconds", "draft_seconds", "seconds_without_drafting", "speedup", "break_even_batch")),
    }
    if not has_speed:
        return described
    from kvcalc.planning.throughput import speed_of
    from kvcalc.throughput.drafting import DraftingModel

    speed = speed_of(case, [])
    if isinstance(speed, str) or not isinstance(speed.model, DraftingModel):
        return described
    model, here = speed.model, (case.workload.batch_size, case.workload.context_tokens)
    described.update(
        verify_seconds=model.verify(*here).seconds,
        draft_seconds=model.draft(*here).seconds,
        seconds_without_drafting=model.target.decode(*here).seconds,
        speedup=model.speedup(*here),
        break_even_batch=model.break_even_batch(here[1]),
    )
    return described


def _added_cache(case: Case) -> int:
    """Bytes that drafting adds to the cache of the batch on one device: its layers, its states and its slots."""
    from kvcalc.planning.case import make_case

    workload = case.workload
    there = case.question._replace(
        speculative=None, speed=None, context_tokens=workload.context_tokens, batch_size=workload.batch_size
    )
    plain = make_case(there)
    sizes = (workload.kv_dtype, workload.context_tokens, workload.batch_size)
    return case.rules.batch_bytes(case.share, *sizes) - plain.rules.batch_bytes(plain.share, *sizes)


def _speculation(question: Question) -> Speculation:
    if question.speculative is None:
        raise ValueError("this question drafts no tokens")
    return question.speculative


def _drafter(question: Question, spec: ModelSpec, workload: Workload) -> Drafter | None:
    asked = _speculation(question)
    model = None if asked.draft_model is None else bind_workload(asked.draft_model, workload)
    return drafter_of(spec, model, asked.method)


def _slots(question: Question, engine: str) -> int:
    serves = question.speed is not None and question.speed.request_tokens is not None
    return lookahead_tokens(engine, _speculation(question).num_tokens, is_longest=not serves)


def _stored(case: Case, drafter: Drafter) -> tuple[StoredWeights, ModelSpec] | str:
    """The weights of one pass of the drafter and how they are stored, and its layers; or why they are not known.

    MTP layers are stored like the model, and a draft model as its own config says. `--dtype` applies to both. An EAGLE
    head has 16 or 32 bits: it is published apart from the model.
    """
    question, workload = case.question, case.workload
    if drafter.is_model:
        found = stored_weights(drafter.spec, drafter.spec, question.dtype, workload.model_dtype)
        return found if isinstance(found, str) else (found, drafter.spec)
    found = stored_weights(case.model, case.spec, question.dtype, workload.model_dtype)
    if isinstance(found, str):
        return found
    if drafter.read is None:
        return f"the weights of {case.spec.name} are not known"
    found = found._replace(weights=drafter.read)
    if not drafter.like_model:
        found = found._replace(linear=None, scheme=None, name=workload.model_dtype.name)
    return found, drafter.spec


def _comes_with_files(case: Case) -> bool:
    """Whether the bytes of the model's weights are those of its files, which hold the MTP layers too."""
    if _speculation(case.question).method != MTP or case.question.dtype is not None or case.spec.checkpoint is None:
        return False
    from kvcalc.model.checkpoint import read_checkpoint

    return read_checkpoint(case.spec.checkpoint) is not None
