"""Prompts' blocks that later requests find, compared with a queue of single blocks as vLLM keeps it."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from random import Random

import pytest

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.rules import Rules
from tests.simulation.cases import SCHEDULES, PieceTimes

PAGE = 4


def conversations(draw: Random, number: int) -> list[Request]:
    """Requests whose prompts begin with the blocks of earlier ones, a second apart."""
    prompts: list[tuple[int, ...]] = [()]
    requests, name = [], 0
    for place in range(number):
        kept = draw.choice(prompts)
        kept = kept[: draw.randrange(len(kept) + 1)]
        fresh = draw.randrange(1, 6)
        names = (*kept, *range(name, name + fresh))
        name += fresh
        prompts.append(names)
        tokens = len(names) * PAGE + draw.randrange(PAGE)
        requests.append(Request(place, float(place), tokens, draw.randrange(1, 20), names=names))
    return requests


def by_blocks(requests: list[Request], capacity: int) -> list[int]:
    """The tokens that each request finds if requests run one after the other, with a queue of single blocks."""
    free: deque[int | None] = deque(
        [None] * capacity
    )  # the names of blocks that nothing uses, the next one to go first
    found = []
    for request in requests:
        hits = 0
        for name in request.names:
            if name not in free:
                break
            hits += 1
        found.append(min(hits * PAGE, (request.prompt_tokens - 1) // PAGE * PAGE))
        for name in request.names[:hits]:
            free.remove(name)
        held = -(-(request.prompt_tokens + request.answer_tokens - 1) // PAGE)
        for _ in range(held - hits):
            free.popleft()
        whole = (request.prompt_tokens + request.answer_tokens - 1) // PAGE
        own: list[int | None] = [*request.names, *[None] * (whole - len(request.names))]
        free.extendleft([None] * (held - whole))
        free.extend(reversed(own))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_requests_in_turn_find_what_a_queue_of_single_blocks_has(seed: int) -> None:
    draw = Random(seed)
    requests = conversations(draw, 150)
    longest = max(request.total_tokens for request in requests)
    capacity = -(-longest // PAGE) + draw.randrange(200)
    pool = BlockPool(capacity, PAGE, range(capacity + 2))
    replica = MixedReplica(
        Rules(SCHEDULES["vllm"], 64, 1), PieceTimes(draw), pool, Arrivals(requests), PrefixCache(pool, PAGE, 1)
    )
    replica.run()
    expected = by_blocks(requests, capacity)
    assert [request.cached_tokens for request in requests] == expected
    assert any(expected)
    assert pool.used == 0


@pytest.mark.parametrize("kind", [MixedReplica, PrefillFirstReplica])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_requests_share_are_counted_once(kind: type[Replica], seed: int) -> None:
    draw = Random(100 + seed)
    found = {}
    for shares in (False, True):
        requests = conversations(Random(seed), 120)
        for request in requests:
            request.arrival /= 4
        longest = max(request.total_tokens for request in requests)
        schedule = SCHEDULES["sglang" if kind is PrefillFirstReplica else "vllm"]
        units = PAGE if kind is PrefillFirstReplica else 1
        capacity = (-(-longest // PAGE) + 40) * units
        pool = BlockPool(capacity, PAGE, range(0, capacity + 2 * units, units))
        prefixes = PrefixCache(pool, PAGE, units) if shares else None
        rules = Rules(schedule._replace(overlaps=bool(draw.randrange(2))), 64, 16)
        replica = kind(rules, PieceTimes(Random(seed)), pool, Arrivals(requests), prefixes)
        replica.recount_every = 1
        replica.run()
        assert pool.used == 0
        assert pool.most_used <= capacity
        found[shares] = sum((request.finish or 0.0) - request.arrival for request in requests)
    assert found[True] < found[False]


def test_a_request_without_names_finds_the_tokens_with_which_it_came() -> None:
    pool = BlockPool(100, PAGE, range(102))
    request = Request(0, 0.0, 40, 5, cached_tokens=32)
    prefixes = PrefixCache(pool, PAGE, 1, finds_own=True)
    MixedReplica(Rules(SCHEDULES["vllm"], 64, 4), PieceTimes(Random(1)), pool, Arrivals([request]), prefixes).run()
    assert request.found_tokens == 32


def test_the_units_in_use_are_those_of_the_blocks_that_are_shared() -> None:
    """The block of the last token is computed again, so it takes room although another request uses the same one."""
    pool = BlockPool(100, PAGE, range(102))
    prefixes = PrefixCache(pool, PAGE, 3)
    running, ended = (Request(0, 0.0, 4 * PAGE, 5, names=names) for names in ((1, 2, 3, 4), (7, 8)))
    for request in (running, ended):
        pool.take(3 * len(request.names))
        request.held = 3 * len(request.names)
        prefixes.add(request, PAGE * len(request.names))
    prefixes.release(ended, 2 * PAGE)
    for names, tokens, pinned, shared in (
        ((1, 2, 3, 4), 4 * PAGE, 9, 3), ((1, 2, 3, 4), 4 * PAGE + 1, 12, 4), ((1, 2, 9), 3 * PAGE, 6, 2),
        ((7, 8), 2 * PAGE, 0, 1), ((7, 8), 9 * PAGE, 0, 2), ((9, 1), 9 * PAGE, 0, 0), ((), 9 * PAGE, 0, 0),
    ):  # fmt: skip
        request = Request(1, 0.0, tokens, 5, names=names)
        assert prefixes.look_up(request, 0) == pinned
        assert (request.shared, request.cached_tokens) == (shared, shared * PAGE)


@pytest.mark.parametrize("has_ended", [False, True])
def test_blocks_that_two_requests_compute_become_one_if_the_cache_merges(has_ended: bool) -> None:
    """Whether the one that was first still runs or has ended (insert in mem_cache/radix_cache.py of SGLang)."""
    for merges in (False, True):
        pool = BlockPool(300, PAGE, range(0, 306, 3))
        prefixes = PrefixCache(pool, PAGE, 3, merges=merges)
        first, second, later = (Request(number, 0.0, 2 * PAGE + number, 5, names=(1, 2)) for number in range(3))
        for request in (first, second):
            pool.take(6)
            request.held = 6
        prefixes.add(first, 2 * PAGE)
        if has_ended:
            prefixes.release(first, 2 * PAGE)
        prefixes.add(second, 2 * PAGE)
        assert (second.held, second.shared) == ((0, 2) if merges else (6, 0))
        assert pool.used == (6 if merges or has_ended else 12)
        if merges:
            for request in (second,) if has_ended else (second, first):
                prefixes.release(request, 2 * PAGE)
            # Nothing is used now. All other units of the pool may be taken before a block is forgotten.
            for units, tokens in ((294, 2 * PAGE), (295, PAGE)):
                prefixes.look_up(later, units)
                assert (pool.used, later.cached_tokens) == (0, tokens)


def test_units_that_two_requests_gave_back_do_not_bring_back_what_they_displaced() -> None:
    pool = BlockPool(15, PAGE, range(0, 306, 3))
    prefixes = PrefixCache(pool, PAGE, 3, merges=True)
    ended, first, second = (
        Request(number, 0.0, 2 * PAGE + 1, 5, names=names) for number, names in enumerate(((7, 8), (1, 2), (1, 2)))
    )
    for request in (ended, first, second):
        pool.take(6)
        request.held = 6
        prefixes.add(request, 2 * PAGE)
        if request is ended:
            prefixes.release(ended, 2 * PAGE)
    # While both blocks were there twice, 12 of 15 units, there was room for one of the other two.
    again = Request(3, 0.0, 2 * PAGE + 1, 5, names=(7, 8))
    prefixes.look_up(again, 0)
    assert again.cached_tokens == PAGE


@pytest.mark.parametrize(
    ("overlaps", "found"), [(False, [(3, 32), (4, 40), (5, 40)]), (True, [(3, 32), (4, 32), (5, 40)])]
)
def test_a_prompt_is_found_when_its_last_chunk_has_been_read(overlaps: bool, found: list[tuple[int, int]]) -> None:
    """A prompt of 40 tokens in steps of 16, and another request with the same prompt, which starts in a later step.

    If a step is prepared while the last one runs, it finds the blocks of chunks that are continued, but not those of
    the last chunk, which get their names with the result (process_batch_result_prefill of SGLang).
    """
    times = PieceTimes(Random(4))
    ends = list(accumulate(times.prompts([chunk], 0) for chunk in ((0, 16), (16, 32), (32, 40))))
    for step, tokens in found:
        arrival = [0.0, *ends, ends[-1] + 1e-9][step - 1 - overlaps]
        first, later = (
            Request(0, 0.0, 40, 50, names=tuple(range(10))),
            Request(1, arrival, 44, 50, names=tuple(range(10))),
        )
        pool = BlockPool(4000, PAGE, range(0, 4040, PAGE))
        rules = Rules(SCHEDULES["sglang"]._replace(overlaps=overlaps), 16, 16)
        PrefillFirstReplica(rules, times, pool, Arrivals([first, later]), PrefixCache(pool, PAGE, PAGE)).run()
        assert (later.found_tokens, later.started == ends[1]) == (tokens, step == 3)
