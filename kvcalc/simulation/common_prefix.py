"""Requests whose prompts begin with the same tokens (`--prefix-tokens`), are sent again, or are turns of sessions.

Each way says how the blocks of a request are named as it is sent, so that the cache finds what it has of them.
"""

from __future__ import annotations

from itertools import count

from kvcalc.engines.prefixes import Prefixes
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.notes import Note
from kvcalc.question.question import CacheReuse, Question
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case, make_case
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Name
from kvcalc.simulation.scheduler import Scheduler

# The most names of a whole prompt, and of a prefix of which shorter prompts have a part. They are looked up again and
# again.
_MOST_NAMES, _PARTS = 512, 64


class Named(NamedTuple):
    """How requests are named, and the tokens in a named block, or None if they share no blocks."""

    name: Name
    block_tokens: int | None


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


class CommonPrefix(NamedTuple):
    """The tokens with which all requests begin, and what the engine finds of them."""

    tokens: int
    prefixes: Prefixes


def case_of(question: Question) -> tuple[Case, CommonPrefix | None]:
    """The case of one request, which has its whole cache itself, and what is found of a common prefix if there is one.

    The notes are those with the common prefix. Raises UsageError (exit 2) if the engine finds no prefixes, or if no
    request is as long as the prefix.
    """
    case = make_case(question)
    if question.reuse is None:
        return case, None
    prefix = CommonPrefix(question.reuse.prefix_tokens, case.prefixes())
    return make_case(question._replace(reuse=None))._replace(notes=case.notes), prefix


def name_repeated(
    question: Question, scheduler: Scheduler, longest_prompt: int, distinct: int, replicas: int, notes: list[Note]
) -> Named | None:
    """Prompts that are sent again: request i has prompt i % `distinct`, and goes to replica i % `replicas`.

    What the engine finds of a prompt that it has computed is its rule for a common prefix. If requests do not share
    blocks, each of them holds all of its cache itself, and finds its prompt if the replica has had it. Slots find it if
    there is one for each prompt, because the oldest is given up.
    """
    what = "prompts that are sent again are not found"
    prefixes = _prefixes_of(question, longest_prompt, what, notes)
    if prefixes is None:
        return None
    size, slots = _block_of(scheduler, longest_prompt), scheduler.rules.max_running
    why = scheduler.cannot_share(size)
    if scheduler.rules.schedule.has_slots and distinct > slots:
        notes.append(Note("load", "not-shared", f"{what}: {distinct:,} prompts take turns in {slots:,} slots"))
        return None
    if why is not None and prefixes.shares_memory:
        notes.append(_holds_all("its prompt", why))
    known, places = set[tuple[int, int]](), count()

    def name(request: Request) -> None:
        found, own = prefixes.found(request.prompt_tokens), request.number % distinct
        key = own, next(places) % replicas
        if why is None:
            request.names = tuple(range(own * _MOST_NAMES, own * _MOST_NAMES + found // size))
        elif key in known:
            request.given_tokens = request.cached_tokens = min(found, request.prompt_tokens - 1)
        known.add(key)

    return Named(name, size if why is None else None)


def name_sessions(question: Question, scheduler: Scheduler, longest_tokens: int, notes: list[Note]) -> Named | None:
    """The turns of sessions: each finds what the cache still has of the session so far, its answers included."""
    what = "what a turn repeats of its session is not found"
    prefixes = _prefixes_of(question, longest_tokens, what, notes)
    block = scheduler.pool.block_tokens or 1
    size = (longest_tokens // block + 1) * block  # no turn has all of it
    why = None if prefixes is None else scheduler.cannot_share(size)
    if why is not None:
        notes.append(Note("load", "not-shared", f"{what}: {why}"))
    before = dict[int, int]()

    def name(request: Request) -> None:
        if prefixes is None or why is not None:
            request.names = ()
            return
        (session,) = request.names
        request.is_turn, request.findable_tokens = True, prefixes.found(before.get(session, 0))
        before[session] = request.total_tokens

    return Named(name, None if prefixes is None or why is not None else size)


def _prefixes_of(question: Question, longest: int, what: str, notes: list[Note]) -> Prefixes | None:
    """What the engine finds of a common prefix of up to `longest` tokens. None, with a note, if it finds none."""
    try:
        return make_case(question._replace(reuse=CacheReuse(longest))).prefixes()
    except KvcalcError as error:
        notes.append(Note("load", "not-shared", f"{what}: {error.message}"))
        return None


def _block_of(scheduler: Scheduler, tokens: int, most: int = _MOST_NAMES) -> int:
    """The tokens in a named block, so that `tokens` tokens have at most `most` names."""
    block = scheduler.pool.block_tokens or 1
    return block * -(-tokens // (block * most))


def _holds_all(what: str, why: str) -> Note:
    return Note("load", "not-shared", f"every request finds {what}, but holds all of its cache itself: {why}")


def name_prefix(prefix: CommonPrefix, scheduler: Scheduler, shortest_prompt: int, notes: list[Note]) -> Named | None:
    """The prefix that all requests have in common. None if the engine finds nothing of it.

    The cache is empty at the start, so the first requests compute the prefix. What is named is kept once. If requests
    do not share blocks, each of them finds the prefix, and holds all of its cache itself.
    """
    prefix_tokens, prefixes = prefix
    found, size = prefixes.found, prefixes.found(prefix_tokens)
    if not size:
        return None
    if shortest_prompt < size:
        # Shorter prompts have a part of the prefix.
        size = _block_of(scheduler, size, _PARTS)
    why = scheduler.cannot_share(size)
    if why is not None and prefixes.shares_memory:
        notes.append(_holds_all("the common prefix", why))

    def name(request: Request) -> None:
        common = found(min(prefix_tokens, request.prompt_tokens))
        if why is None:
            request.names = tuple(range(common // size))
        else:
            request.given_tokens = max(request.given_tokens, min(common, request.prompt_tokens - 1))
            request.cached_tokens = request.given_tokens

    return Named(name, size if why is None else None)
