"""Drafted tokens (speculative decoding) in a case: the check, the engine's settings, and the layers.

Everything here is called only if the question drafts tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines import engine_class
from kvcalc.engines.engine import Engine
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
    MTP,
    NGRAM,
    WITH_DRAFT_MODEL,
    Drafter,
    Speculation,
)
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.notes import Note

_EXAMPLE = "for example --speculative mtp:3 --acceptance-length 2.4"
# The engines' names for the number of drafted tokens, on which their recurrent states depend. SGLang's counts one more:
# the token before the drafted ones, which is checked with them.
_SETTINGS = {
    "vllm": ("num-speculative-tokens", 0), "llama.cpp": ("draft-max", 0), "sglang": ("speculative-num-draft-tokens", 1),
}  # fmt: skip
OF_THE_MODEL_ALONE = (
    "max-running-requests", "max-mamba-cache-size", "speculative-num-draft-tokens", "n-gpu-layers", "n-cpu-moe",
    "cpu-moe", "host-memory", "host-bandwidth",
)  # fmt: skip
"""Settings that do not count for the model that drafts: it shares the request table, and checks no drafts.

llama.cpp places it by options of its own, and puts all of it on the device by default. Only --no-kv-offload counts for
both (load_model in tools/server/server-context.cpp: params_dft).
"""
# N-grams are drafted in trees of this many branches (speculative_ngram_max_bfs_breadth, SGLang 0.5.23).
_NGRAM_BRANCHES = {"sglang": ("speculative-eagle-topk", "10")}
_WITH_DFLASH = ("logical", "vllm", "sglang", "tensorrt-llm")


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
    if asked.method in (DRAFT, DFLASH) and asked.draft_model is None:
        raise UsageError(f"--speculative {asked}: the draft model is missing", "--draft-model MODEL")
    if asked.method not in WITH_DRAFT_MODEL and asked.draft_model is not None:
        raise UsageError(
            f"--draft-model {asked.draft_model.name}: {asked.method} has no draft model",
            f"use --speculative draft:{asked.num_tokens}",
        )


def check_engine_drafts(asked: Speculation, engine: str, spec: ModelSpec) -> None:
    """Raise UsageError (exit 2) for a method that the engine does not have, or not for this model.

    `generate` of Transformers has a draft model (assistant_model) and n-grams (prompt_lookup_num_tokens). mlx-lm has
    draft models alone, and must be able to trim the model's cache (speculative_generate_step, mlx_lm/generate.py).
    """
    name = engine.partition("@")[0]
    if asked.method == DFLASH and name not in _WITH_DFLASH:
        raise UsageError(
            f"--speculative {asked}: DFlash is not modelled for {name}", "use --engine vllm, sglang or tensorrt-llm"
        )
    if name == "transformers" and asked.method not in (DRAFT, NGRAM):
        raise UsageError(
            f"--speculative {asked}: transformers drafts with a draft model or n-grams only",
            f"use --speculative ngram:{asked.num_tokens}, or another engine",
        )
    if name == "mlx" and asked.method != DRAFT:
        raise UsageError(
            f"--speculative {asked}: mlx drafts with a draft model only",
            f"use --speculative draft:{asked.num_tokens} --draft-model MODEL, or another engine",
        )
    if name == "tensorrt-llm" and has_states(spec):
        raise UsageError(
            f"--speculative {asked}: the states of drafts are not modelled for {spec.name} in tensorrt-llm",
            "leave --speculative out, or use --engine vllm or sglang",
        )
    if name == "mlx" and has_states(spec):
        raise UsageError(
            f"--speculative {asked}: mlx drafts no tokens for {spec.name}, whose recurrent states it cannot trim",
            "leave --speculative out, or use another engine",
        )


def check_prompt_ranks(asked: Speculation, settings: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) if vLLM divides prompts and does not draft with this method then, or if SGLang does.

    It drafts with MTP layers of one module (PCPManager.validate_config, v1/worker/gpu/pcp_manager.py, vLLM 0.33.0).
    """
    if settings.get("attn-cp-size", "1") != "1":
        raise UsageError(f"--speculative {asked}: not modelled with --attn-cp-size", "leave one of them out")
    if "prefill-context-parallel-size" in settings and asked.method != MTP:
        raise UsageError(
            f"--speculative {asked}: vLLM does not draft so with --prefill-context-parallel-size",
            f"use --speculative mtp:{asked.num_tokens}",
        )


def engine_settings(asked: Speculation, engine: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engine's settings, with the number of drafted tokens for the engines that have such a setting."""
    engine = engine.partition("@")[0]
    if engine not in _SETTINGS:
        return settings
    name, more = _SETTINGS[engine]
    tokens, given = str(asked.num_tokens + more), settings.get(name)
    if given not in (None, tokens):
        raise UsageError(f"--{name} {given} contradicts --speculative {asked}", f"remove --{name}")
    branches = _NGRAM_BRANCHES.get(engine) if asked.method == NGRAM else None
    return {**dict((branches,) if branches else ()), **settings, name: tokens}


def drafter_of(asked: Speculation, spec: ModelSpec, workload: Workload) -> Drafter | None:
    """What drafts tokens for `spec`, which is bound to `workload`. None for n-grams."""
    model = None if asked.draft_model is None else bind_workload(asked.draft_model, workload)
    return drafting.drafter_of(spec, model, asked.method)


def with_layers(asked: Speculation, spec: ModelSpec, workload: Workload) -> ModelSpec:
    """`spec` with the layers that draft tokens. Raises UsageError (exit 2) if this is not possible or not modelled."""
    drafter = drafter_of(asked, spec, workload)
    if workload.pipeline_parallel_size > 1:
        raise LayoutError(
            f"--pp {workload.pipeline_parallel_size}: drafted tokens are not modelled with pipeline stages",
            "use --tp to split the model, or leave --speculative out",
        )
    if drafter is not None:
        check_tensor_parallel(drafter.spec, workload.tensor_parallel_size)
    return drafting.with_drafter(spec, drafter)


def has_own_pool(engine: str, drafter: Drafter | None) -> bool:
    """Whether what drafts tokens has a pool of its own. MTP layers are in the model's own cache."""
    return drafter is not None and not drafter.like_model and not engine_class(engine).joins_drafts


def slots_of(asked: Speculation, engine: Engine, serves_requests: bool) -> int:
    """The slots that a running request takes beyond its own tokens.

    Requests to serve may be shorter than the engine allows. Without them, the context is the longest request.
    """
    return engine.lookahead_tokens(asked.num_tokens, is_longest=not serves_requests, by_ngrams=asked.method == NGRAM)


def notes_of(asked: Speculation, engine: str, spec: ModelSpec, settings: Mapping[str, str]) -> list[Note]:
    """What is assumed about an EAGLE head without a config, and how many sequences an engine drafts for at a time.

    Transformers refuses a batch. In mlx_lm.server, requests wait for each other.
    """
    notes = []
    if engine == "sglang" and "max-running-requests" not in settings:
        from kvcalc.engines.sglang.profile import DRAFTING_REQUESTS

        text = f"SGLang runs at most {DRAFTING_REQUESTS} requests if it drafts (set --max-running-requests)"
        notes.append(Note("speculative", "running-limit", text))
    if asked.method in (EAGLE, EAGLE1) and asked.draft_model is None:
        text = f"the EAGLE head is assumed to be a layer like the last of {spec.name}; --draft-model reads its config"
        notes.append(Note("speculative", "assumed-head", text))
    if engine == "transformers":
        text = "transformers drafts tokens for one sequence at a time: it refuses a larger batch"
        notes.append(Note("speculative", "one-sequence", text))
    if engine == "mlx":
        text = "mlx-lm drafts tokens for one sequence at a time: other requests wait"
        notes.append(Note("speculative", "one-sequence", text))
    return notes


def describe_asked(asked: Speculation) -> dict[str, Any]:
    """How tokens are drafted, as it was asked for."""
    return {
        "method": asked.method,
        "num_draft_tokens": asked.num_tokens,
        "acceptance_length": asked.acceptance_length,
        "draft_model": None if asked.draft_model is None else asked.draft_model.name,
    }
