"""Requests whose prompts begin with the same tokens, such as a system prompt (`--prefix-tokens`), or are sent again."""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.engines.prefixes import Prefixes
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.notes import Note
from kvcalc.question.question import CacheReuse, Question
from kvcalc.server.case import Case, make_case
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.scheduler import Scheduler

# The most names of a prefix. They are looked up again and again.
_MOST_NAMES = 512


def check_reuse(question: Question) -> None:
    """Raise UsageError (exit 2) if the question has sessions, tiers of memory or a link, which are not simulated."""
    reuse = question.reuse
    if reuse is None:
        return
    for value, option in (
        (reuse.turns, "--turns"), (reuse.offload, "--offload"), (reuse.transfer, "--transfer-bandwidth"),
    ):  # fmt: skip
        if value:
            raise UsageError(f"{option}: is not simulated", "--prefix-tokens is, and the prefixes of a --trace")


def check_no_names(named_tokens: int | None) -> None:
    """Raise UsageError (exit 2) if a trace names the blocks of its prompts, of `named_tokens` tokens."""
    if named_tokens is not None:
        raise UsageError("--prefix-tokens: the trace says which blocks prompts share", "leave it out")


def case_of(question: Question) -> tuple[Case, Prefixes | None]:
    """The case of one request, which has its whole cache itself, and what is found of a common prefix if there is one.

    The notes are those with the common prefix. Raises UsageError (exit 2) if the engine finds no prefixes, or if no
    request is as long as the prefix.
    """
    case = make_case(question)
    if question.reuse is None:
        return case, None
    return make_case(question._replace(reuse=None))._replace(notes=case.notes), case.prefixes()


def repeat_prompts(
    question: Question, scheduler: Scheduler, requests: Sequence[Request], distinct: int, replicas: int,
    notes: list[Note],
) -> int | None:  # fmt: skip
    """Name the blocks of prompts that are sent again: request i has prompt i % `distinct`, and goes to replica i % n.

    Returns the tokens in a named block, or None. What the engine finds of a prompt that it has computed is its rule for
    a common prefix. If requests do not share blocks, each of them holds all of its cache itself, and finds its prompt
    if the replica has had it. Slots find it if there is one for each prompt, because the oldest is given up.
    """
    longest = max(request.prompt_tokens for request in requests)
    try:
        prefixes = make_case(question._replace(reuse=CacheReuse(longest))).prefixes()
    except KvcalcError as error:
        notes.append(Note("load", "not-shared", f"prompts that are sent again are not found: {error.message}"))
        return None
    block = scheduler.pool.block_tokens or 1
    size = block * -(-longest // (block * _MOST_NAMES))
    why, slots = scheduler.cannot_share(size), scheduler.rules.max_running
    if scheduler.rules.schedule.has_slots and distinct > slots:
        text = f"prompts that are sent again are not found: {distinct:,} prompts take turns in {slots:,} slots"
        notes.append(Note("load", "not-shared", text))
        return None
    if why is not None and prefixes.shares_memory:
        text = f"every request finds its prompt, but holds all of its cache itself: {why}"
        notes.append(Note("load", "not-shared", text))
    known = set[tuple[int, int]]()
    for place, request in enumerate(requests):
        found, own = prefixes.found(request.prompt_tokens), request.number % distinct
        if why is None:
            request.names = tuple(range(own * _MOST_NAMES, own * _MOST_NAMES + found // size))
        elif (own, place % replicas) in known:
            request.given_tokens = request.cached_tokens = min(found, request.prompt_tokens - 1)
        known.add((own, place % replicas))
    return size if why is None else None


def share_prefix(
    prefixes: Prefixes, scheduler: Scheduler, requests: Sequence[Request], prefix_tokens: int, notes: list[Note]
) -> int | None:
    """Name the blocks that all `requests` have in common. Returns the tokens in a named block, or None.

    The cache is empty at the start, so the first requests compute the prefix. What is named is kept once. If requests
    do not share blocks, each of them finds the prefix, and holds all of its cache itself.
    """
    found, size = prefixes.found, prefixes.found(prefix_tokens)
    if not size:
        return None
    if min(request.prompt_tokens for request in requests) < size:
        # Shorter prompts have a part of the prefix: whole blocks of it, or 1 / _MOST_NAMES if its blocks are more.
        block = scheduler.pool.block_tokens
        size = block * -(-size // (block * _MOST_NAMES))
    why = scheduler.cannot_share(size)
    for request in requests:
        common = found(min(prefix_tokens, request.prompt_tokens))
        if why is None:
            request.names = tuple(range(common // size))
        else:
            request.given_tokens = max(request.given_tokens, min(common, request.prompt_tokens - 1))
            request.cached_tokens = request.given_tokens
    if why is not None and prefixes.shares_memory:
        text = f"every request finds the common prefix, but holds all of its cache itself: {why}"
        notes.append(Note("load", "not-shared", text))
    return size if why is None else None
