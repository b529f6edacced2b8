"""Prompts whose first tokens are found in the prefix cache: the check of the share, and the note about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine
from kvcalc.model.spec import ModelSpec, has_cross_attention
from kvcalc.notes import Note

if TYPE_CHECKING:
    from kvcalc.planning.case import Question


def prefix_hit_notes(rate: float, engine: str, spec: ModelSpec) -> list[Note]:
    """The notes about a hit rate; none for 0.

    Raises UsageError (exit 2) for a rate outside 0 to below 1, and if the engine finds no prompts in its cache:
    `generate` of Transformers starts every call with an empty cache, and vLLM disables prefix caching for
    encoder-decoder models (vllm/config/scheduler.py). llama.cpp keeps the prompt of each slot.
    """
    given = f"--prefix-hit-rate {rate:g}"
    if not 0 <= rate < 1:
        raise UsageError(f"{given}: must be at least 0 and below 1", "for example --prefix-hit-rate 0.3")
    if not rate:
        return []
    if engine == "transformers":
        raise UsageError(f"{given}: transformers has no prefix cache", "leave it out, or use another engine")
    if engine == "vllm" and has_cross_attention(spec):
        raise UsageError(f"{given}: vLLM has no prefix cache for encoder-decoders like {spec.name}", "leave it out")
    text = f"{rate:.0%} of each prompt is found in the prefix cache: no prefill for it, but memory as without hits"
    return [Note("throughput", "prefix-hits", text)]


def cached_tokens(asked: Question, rules: Engine, share: ModelSpec, dtype: Dtype, tokens: int) -> float:
    """The tokens of a prompt of `tokens` tokens that are found, if the whole context is the prompt.

    The hit rate of a question with a shared prefix is that of its own length, and this may be another one.
    """
    reuse, rate = asked.reuse, 0.0 if asked.speed is None else asked.speed.prefix_hit_rate
    if reuse is None or not (reuse.prefix_tokens or reuse.turns):
        return rate * tokens
    from kvcalc.planning.reuse import turns_of

    prefix = min(reuse.prefix_tokens, tokens)
    turns = turns_of(reuse._replace(prefix_tokens=prefix), tokens, tokens, rules.prefixes(share, dtype))
    return turns[-1].reused_tokens
