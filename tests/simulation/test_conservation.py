"""What a simulation counts adds up: every token, every request, and every unit of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random

import pytest

from kvcalc.engines.account import RunningPool
from kvcalc.simulation.coupled import Coupled, Link
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.lock_step import LockStep, OfRank
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool, PoolError
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.routing import RoundRobin
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.scheduler import Scheduler
from tests.simulation import supply_of
from tests.simulation.cases import SCHEDULES, PieceTimes
from tests.simulation.test_lock_step import RankTimes

KINDS = {"vllm": MixedReplica, "tensorrt-llm": MixedReplica, "sglang": PrefillFirstReplica}


def drawn(draw: Random, number: int) -> list[Request]:
    return [
        Request(n, n * draw.choice([0.0, 0.25]), draw.randrange(1, 50), draw.randrange(1, 40)) for n in range(number)
    ]


@pytest.mark.parametrize("engine", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_after_the_first_has_a_time_since_the_one_before(engine: str, num_ranks: int, seed: int) -> None:
    draw = Random(seed)
    requests = sorted(drawn(draw, 60), key=lambda request: request.arrival)
    for number, request in enumerate(requests):
        request.number = number
    # Little room, so that some requests are preempted.
    rules, capacity = Rules(SCHEDULES[engine], 100, 6), 120
    arrivals, times = Arrivals(requests), RankTimes(draw)

    def rank(inbox: Arrivals) -> Replica:
        return KINDS[engine](rules, times, BlockPool(capacity, 1, range(capacity + 9)), inbox)

    ranks = [rank(arrivals)] if num_ranks == 1 else [rank(OfRank(arrivals)) for _ in range(num_ranks)]
    server: Server = ranks[0] if num_ranks == 1 else LockStep(RoundRobin(ranks), times, arrivals)
    server.run()
    counted = sum(rank.gaps.tokens for rank in ranks) - sum(request.answer_tokens - 1 for request in requests)
    # SGLang throws away the token of a retracted request whose step still runs. It is counted, and given once more.
    retracted = sum(request.preemptions for request in requests) if engine == "sglang" else 0
    assert 0 <= counted <= retracted
    assert server.finished == sum(rank.finished for rank in ranks) == len(requests)
    assert [rank.pool.used for rank in ranks] == [0] * num_ranks


class Checked(PieceTimes):
    """Step times that check the chunks they are asked for."""

    def prompts(self, chunks: Sequence[tuple[int, int]], batch: int) -> float:
        assert all(start < end for start, end in chunks), chunks
        return super().prompts(chunks, batch)


@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_waits_if_checked_drafts_fill_the_steps(seed: int) -> None:
    """Eight requests check 32 tokens in a step, and a step has only 24: then no prompt goes on."""
    draw = Random(seed)
    requests = sorted(drawn(draw, 40), key=lambda request: request.arrival)
    for number, request in enumerate(requests):
        request.number = number
    rules = Rules(SCHEDULES["vllm"], 24, 8, tokens_per_step=Fraction(2), checked_tokens=4, lookahead_tokens=3)
    replica = MixedReplica(rules, Checked(draw), BlockPool(10_000, 1, range(10_100)), Arrivals(requests))
    replica.run()
    assert replica.finished == len(requests)
    assert replica.pool.used == 0


def test_blocks_that_no_request_holds_are_noticed() -> None:
    replica = MixedReplica(
        Rules(SCHEDULES["vllm"], 100, 8), PieceTimes(Random(1)), BlockPool(100, 1, range(109)), Arrivals([])
    )
    replica.check()
    replica.pool.take(1)
    with pytest.raises(PoolError, match="requests hold 0 blocks, but 1 are taken"):
        replica.check()


def test_a_long_simulation_says_how_far_it_is() -> None:
    requests, heard = drawn(Random(1), 3000), list[tuple[int, int]]()
    times = PieceTimes(Random(1))

    def replicas(sends: bool) -> Callable[[Arrivals], Server]:
        rules = Rules(SCHEDULES["vllm"], 100, 8, sends=sends)
        return lambda arrivals: MixedReplica(rules, times, BlockPool(10_000, 1, range(10_100)), arrivals)

    requests.sort(key=lambda request: request.arrival)
    for number, request in enumerate(requests):
        request.number = number
    fleet = Coupled(supply_of(requests), (1, replicas(True)), (1, replicas(False)), Link(2**20, lambda tokens: tokens))
    fleet.run(None, lambda done, of_all: heard.append((done, of_all)))
    assert len(heard) > 1
    assert heard == sorted(heard)
    assert {of_all for _, of_all in heard} == {3000}
    assert 0 < heard[-1][0] <= 3000


class Counted(PrefixCache):
    """A cache that counts its unused units again after every call."""

    def check(self) -> None:
        assert self._unused_units == sum(self._unused.values())
        assert min(self._users.values(), default=1) > 0
        assert not {(True, name) for name in self._users} & set(self._unused)
        assert self.pinned_units <= self._pool.used

    def start(self, request: Request) -> None:
        super().start(request)
        self.check()

    def add(self, request: Request, tokens: int) -> None:
        super().add(request, tokens)
        self.check()

    def release(self, request: Request, tokens: int) -> None:
        super().release(request, tokens)
        self.check()


@pytest.mark.parametrize("finds_own", [False, True])
@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_units_of_prefixes_are_either_used_or_not(engine: str, merges: bool, finds_own: bool) -> None:
    from tests.simulation.test_prefix_cache import PAGE, conversations

    draw, units = Random(7), PAGE if engine == "sglang" else 1
    requests = conversations(draw, 150)
    for request in requests:
        request.arrival /= 4
    longest = max(request.total_tokens for request in requests)
    capacity = (-(-longest // PAGE) + 12) * units
    pool = BlockPool(capacity, PAGE, range(0, capacity + 9 * units, units))
    cache = Counted(pool, PAGE, units, finds_own=finds_own, merges=merges)
    KINDS[engine](Rules(SCHEDULES[engine], 64, 16), PieceTimes(draw), pool, Arrivals(requests), cache).run()
    assert any(request.found_tokens for request in requests)
    assert (pool.used, cache.pinned_units) == (0, 0)


@pytest.mark.parametrize(("finds_own", "found"), [(True, 16), (False, 0)])
def test_a_preempted_request_finds_what_it_left_only_if_the_engine_looks(finds_own: bool, found: int) -> None:
    pool = BlockPool(100, 4, range(102))
    cache = PrefixCache(pool, 4, 1, finds_own=finds_own)
    request = Request(0, 0.0, 18, 5)
    pool.take(5)
    request.held = 5
    cache.release(request, 18)
    # Four whole blocks stay until their memory is needed.
    assert cache.look_up(request, 0) == 0
    assert request.cached_tokens == found


def prompt(number: int, names: Sequence[int], more: int = 0) -> Request:
    return Request(number, 0.0, 4 * len(names) + more, 5, names=tuple(names))


def test_a_block_that_two_requests_computed_is_used_until_both_have_ended() -> None:
    pool = BlockPool(100, 4, range(102))
    cache = PrefixCache(pool, 4, 1, merges=True)
    one, two = prompt(0, (1, 2), 1), prompt(1, (1, 2), 1)
    for request in (one, two):
        assert cache.look_up(request, 0) == 0
        cache.start(request)
        pool.take(3)
        request.held = 3
    cache.add(one, 7)
    # A block gets its name as soon as it is whole.
    assert (one.shared, cache.pinned_units, pool.used) == (1, 1, 6)
    cache.add(one, 9)
    cache.add(two, 9)
    # The second request's blocks are given back for those with the names.
    assert (two.shared, cache.pinned_units, pool.used) == (2, 2, 4)
    for request, pinned in ((one, 2), (two, 0)):
        pool.give(request.held)
        cache.release(request, 8)
        assert cache.pinned_units == pinned
    later = prompt(2, (1, 2), 1)
    assert (cache.look_up(later, 0), later.cached_tokens) == (0, 8)


def test_a_request_shares_no_block_with_its_last_token() -> None:
    """So only the blocks before it count among those that others use."""
    pool = BlockPool(100, 4, range(102))
    cache = PrefixCache(pool, 4, 1)
    first = prompt(0, (1, 2, 3), 1)
    cache.look_up(first, 0)
    cache.start(first)
    pool.take(4)
    first.held = 4
    cache.add(first, 12)
    lookups: list[tuple[Callable[[], Request], int, int]] = [
        (lambda: prompt(1, (1, 2, 3), 1), 12, 3),
        (lambda: prompt(2, (1, 2, 3)), 8, 2),
        (lambda: prompt(3, (1, 2)), 4, 1),
        (lambda: prompt(4, (1, 2, 9), 1), 8, 2),
    ]
    for make, found, pinned in lookups:
        request = make()
        assert (cache.look_up(request, 0), request.cached_tokens) == (pinned, found)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("engine", KINDS)
def test_a_request_that_is_said_to_fit_runs_alone_and_another_one_never_does(engine: str, page: int) -> None:
    draw, seen = Random(7), set()
    for prompt, answer, drafts in ((p, a, d) for p in range(20, 44, 3) for a in range(2, 20, 5) for d in (0, 2)):
        units = page if engine == "sglang" else 1
        capacity = 48 // page * units
        table = range(0, capacity + 90 * units, units)
        rules = Rules(SCHEDULES[engine], 200, 4)._replace(lookahead_tokens=drafts, checked_tokens=1 + drafts)
        request, pool = Request(0, 0.0, prompt, answer), BlockPool(capacity, page, table)
        scheduler = Scheduler(rules, RunningPool(capacity, page, table), False, 1)
        replica = KINDS[engine](rules, PieceTimes(draw), pool, Arrivals([request]))
        fits = scheduler.fits(request)
        seen.add(fits)
        try:
            replica.run()
            # vLLM never stores the last token, for which room is asked all the same.
            assert fits or (engine == "vllm" and prompt + answer + drafts == 49)
        except PoolError:
            assert not fits
    assert seen == {True, False}
