"""What the prefix cache of a case's engine keeps on one device."""

from __future__ import annotations

from kvcalc.engines.prefixes import Prefixes
from kvcalc.planning.case import Case
from kvcalc.planning.reuse import prompt_tokens_of, turns_of


def prefixes_of(case: Case) -> Prefixes:
    """The prefix cache of the case's engine, on one device of the largest pipeline stage."""
    workload = case.workload
    dtype, batch = workload.kv_dtype, workload.attention_batch(workload.batch_size)
    return case.allocation.prefixes(
        case.allocation.largest_stage(case.share, dtype, workload.context_tokens, batch), dtype
    )


def session_tokens_of(case: Case, prefixes: Prefixes) -> int:
    """The tokens that a later turn finds of a session: before the last turn, or of the whole context without turns."""
    reuse, workload = case.question.reuse, case.workload
    tokens = workload.context_tokens
    if reuse is None or not reuse.turns:
        return prefixes.found(tokens)
    prompt = prompt_tokens_of(case.question.speed, workload)
    return prefixes.found(turns_of(reuse, prompt, tokens, prefixes)[-2].end_tokens)
