"""The parts in which llama.cpp computes a prompt: batches, which end where the server saves the state of the model.

Source: pre_decode of update_slots, tools/server/server-context.cpp, 2026 (n_ctx_checkpoints, from pull request 20288
on), and n_batch (common/common.h).
"""

from __future__ import annotations

from kvcalc.memory.engines.llama_cpp import LlamaCpp
from kvcalc.model.caches import ChunkedAttention, SlidingWindowAttention
from kvcalc.model.spec import all_caches, has_states
from kvcalc.planning.admission import BATCH_TOKENS
from kvcalc.planning.case import Case


def saved_at(case: Case) -> tuple[int, ...]:
    """Where a part of a prompt ends so that the server can save the state, in tokens before the end of the prompt."""
    rules = case.rules
    if not isinstance(rules, LlamaCpp):
        return ()
    slides = any(isinstance(cache, (SlidingWindowAttention, ChunkedAttention)) for cache in all_caches(case.spec))
    needs_states = has_states(case.spec) or (slides and not rules.chosen.swa_full)
    return (rules.chosen.ubatch_size + 4, 4) if needs_states else ()


def parts_of(case: Case, tokens: int, cached_tokens: int) -> list[tuple[int, int]]:
    """The parts of a prompt of `tokens` tokens whose first `cached_tokens` are cached: [(first, last + 1), ...]."""
    stops = [tokens - min(before, BATCH_TOKENS) for before in saved_at(case)]
    found, start = [], cached_tokens
    while start < tokens:
        end = min(tokens, start + BATCH_TOKENS)
        end = min((stop for stop in stops if start < stop <= end), default=end)
        found.append((start, end))
        start = end
    return found
