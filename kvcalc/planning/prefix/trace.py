"""Runs the prompts of a trace through the stack of a prefix cache."""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.traces import Trace
from kvcalc.traces.reuse import MOST_BLOCKS, LruStack, NotAPrefixError

_HINT = "give a trace with hash_ids (Mooncake, Qwen-Bailian) or with prompt_token_ids"
_CONTRADICTION = "the hash_ids contradict earlier rows: an id must stand for a block and all blocks before it"
# The progress is reported after this many requests.
_REPORT = 2000


class Profile(NamedTuple):
    """A trace that has been read: its stack, and what its requests have in total.

    `counted_seconds` are those from the first counted request to the last.
    """

    trace: Trace
    stack: LruStack
    duration_seconds: float
    counted_seconds: float
    answer_tokens: int
    longest_prompt: int


def profile(
    trace: Trace,
    engine_tokens: int,
    most_blocks: int = MOST_BLOCKS,
    report: Callable[[int], None] | None = None,
    warm_up: int = 0,
    optimal: bool = False,
) -> Profile:
    """Read all requests of `trace`. An engine finds prefixes in steps of `engine_tokens` tokens.

    The first `warm_up` requests fill the cache and are not counted. `optimal` keeps the next uses of all blocks.
    `report` is called with the number of requests from time to time. Raises what reading a trace raises, and UsageError
    (exit 2) if the trace says nothing about shared prefixes, or if its blocks are not whole blocks of the engine.
    """
    stack: LruStack | None = None
    seconds, answers, longest = 0.0, 0, 0
    start = None
    for request in trace:
        blocks, block_tokens = request.block_hashes, request.block_tokens
        if blocks is None or block_tokens is None:
            raise UsageError(f"{trace.name}: a trace in the format {trace.format} does not name shared blocks", _HINT)
        if stack is None:
            if block_tokens % engine_tokens:
                words = f"blocks of {block_tokens:,} tokens are not whole blocks of the engine, which have"
                raise UsageError(f"{trace.name}: {words} {engine_tokens:,}", "set the engine's --block-size")
            stack = LruStack(block_tokens, most_blocks, optimal)
        # The last token is always computed, for its logits.
        usable = (request.prompt_tokens - 1) // engine_tokens * engine_tokens
        try:
            stack.add(blocks, request.prompt_tokens, usable, stack.num_requests >= warm_up)
        except NotAPrefixError:
            trace.reject(request, _CONTRADICTION)
            continue
        seconds = request.arrival_seconds
        if start is None and stack.num_counted:
            start = seconds
        answers += request.answer_tokens
        longest = max(longest, request.prompt_tokens)
        if report is not None and not stack.num_requests % _REPORT:
            report(stack.num_requests)
    if stack is None:
        raise UsageError(f"{trace.name}: no request in it", _HINT)
    if start is None:
        raise UsageError(f"{trace.name}: no request after the warm-up", "use a smaller --after")
    return Profile(trace, stack, seconds, seconds - start, answers, longest)
