"""The parts in which llama.cpp computes a prompt: batches (n_batch, common/common.h), which end where the server saves
the state of the model (`Engine.prompt_stops`)."""

from __future__ import annotations

from kvcalc.planning.admission import BATCH_TOKENS
from kvcalc.planning.case import Case


def parts_of(case: Case, tokens: int, cached_tokens: int) -> list[tuple[int, int]]:
    """The parts of a prompt of `tokens` tokens whose first `cached_tokens` are cached: [(first, last + 1), ...]."""
    stops = [tokens - min(before, BATCH_TOKENS) for before in case.engine.prompt_stops(case.spec)]
    found, start = [], cached_tokens
    while start < tokens:
        end = min(tokens, start + BATCH_TOKENS)
        end = min((stop for stop in stops if start < stop <= end), default=end)
        found.append((start, end))
        start = end
    return found
