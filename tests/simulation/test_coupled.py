"""Prefill and decode instances that work together, compared with schedulers that run one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Any

import pytest

from kvcalc.simulation import coupled
from kvcalc.simulation.coupled import Coupled, Link, Sending, check_conservation
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.lock_step import LockStep, OfRank
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool, PoolError
from kvcalc.simulation.replicas.prefill_first import PrefillFirstReplica
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.rules import Lag, Rules
from kvcalc.simulation.replicas.server import Server
from tests.simulation import reference, supply_of
from tests.simulation.cases import SCHEDULES
from tests.simulation.reference import Job, Part, one_by_one
from tests.simulation.test_lock_step import ROUTERS, RankTimes, Routes


class Instance:
    """One instance of the reference: its schedulers run one step after the other."""

    def __init__(
        self, servers: list[reference.Server], step: Callable[[list[Part]], float],
        route: Callable[[list[Job], Sequence[reference.Server]], None],
    ) -> None:  # fmt: skip
        self.servers, self.step, self.route = servers, step, route
        self.coming: list[Job] = []
        self.arrived: list[Job] = []
        self.now = self.visible = 0.0
        self.is_idle = False
        self.ending: tuple[float, list[Any]] | None = None
        self.decode_steps = 0

    def next_time(self) -> float:
        """When its step ends, or the next one begins."""
        if self.ending:
            return self.ending[0]
        if self.has_work() and not self.is_idle:
            return self.now
        return max(self.now, self.next_change())

    def has_work(self) -> bool:
        return bool(self.arrived) or any(server.waiting or server.running for server in self.servers)

    def next_change(self) -> float:
        """The next arrival, or the end of a transfer if jobs wait for its blocks."""
        known = [job.arrival for job in self.coming]
        sent = [job.sent for server in self.servers for job in server.sending if job.sent is not None]
        return min([*known, *(sent if self.has_work() else ())], default=inf)

    def begin(self) -> None:
        if self.is_idle:
            self.now = self.visible = max(self.now, self.next_change())
            self.is_idle = False
        self.coming.sort(key=lambda job: job.arrival)
        while self.coming and self.coming[0].arrival <= self.visible:
            self.arrived.append(self.coming.pop(0))
        for server in self.servers:
            server.free_sent(self.visible)
        self.route(self.arrived, self.servers)
        plans = [server.plan(is_alone=len(self.servers) == 1) for server in self.servers]
        if not any(decoding or chunks for decoding, chunks in plans):
            if (self.arrived and self.visible < self.now) or any(server.has_let_go for server in self.servers):
                self.visible = self.now
            else:
                self.is_idle = True
            return
        for server in self.servers:
            for job in server.running:
                job.started = self.now if job.started is None else job.started
        parts = [([job.computed + 1 for job in decoding], [c for _, c in chunks]) for decoding, chunks in plans]
        self.decode_steps += any(decoding for decoding, _ in plans)
        self.ending = self.now + self.step(parts), plans

    def end(self) -> list[Job]:
        assert self.ending is not None
        end, plans = self.ending
        ended = []
        for server, (decoding, chunks) in zip(self.servers, plans):
            ended += list(server.apply(decoding, chunks, end))
            server.decode_steps = self.decode_steps
        self.visible = self.now if self.servers[0].rules.schedule.overlaps else end
        self.now, self.ending = end, None
        return ended


def serve_apart(
    pools: tuple[list[Instance], list[Instance]], jobs: list[Job], clients: int | None,
    seconds_of: Callable[[int], float], lag: float,
) -> list[Job]:  # fmt: skip
    """Run both pools, and return what happened on the decode instances, by number."""
    prefills, decodes = pools
    later, asked = list(jobs), 0
    ready = [job.arrival for job in jobs] if clients is None else [0.0] * min(clients, len(jobs))
    computed: list[Job] = []
    answers: list[Job] = []
    free = [[0.0] * len(pool) for pool in pools]
    sent = 0
    while True:
        busy = [one for pool in pools for one in pool if one.ending]
        first = min([one.next_time() for pool in pools for one in pool] + (ready[:1] if later else []))
        if first == inf:
            break
        ending = [one for one in busy if one.next_time() == first]
        for one in ending:
            for job in one.end():
                if one in prefills:
                    computed.append(job)
                elif clients is not None:
                    ready.append(first + 2 * lag)
                    ready.sort()
        for job in sorted(computed, key=lambda job: job.number):
            sender, place = job.number % len(prefills), sent % len(decodes)
            start = max(first, free[0][sender], free[1][place])
            free[0][sender] = free[1][place] = job.sent = end = start + seconds_of(job.prompt)
            answers.append(Job(end, job.prompt, jobs[job.number].answer, job.prompt - 1, job.number))
            decodes[place].coming.append(answers[-1])
            sent += 1
        computed.clear()
        while later and ready and ready[0] == first:
            job = later.pop(0)
            job.arrival = ready.pop(0)
            prefills[asked % len(prefills)].coming.append(Job(job.arrival, job.prompt, 1, job.cached, job.number))
            asked += 1
        if not ending:
            for one in (one for pool in pools for one in pool if not one.ending and one.next_time() == first):
                one.begin()
    return sorted(answers, key=lambda job: job.number)


class Pool:
    """One pool of a random case, once for the simulation and once for the reference."""

    def __init__(
        self, draw: Random, engine: str, longest: int, lag: float, most_replicas: int, sends: bool = False
    ) -> None:  # fmt: skip
        self.engine, self.times, self.page = engine, RankTimes(draw), draw.choice([1, 4])
        self.number, self.ranks = draw.randrange(1, 4), draw.choice([1, 1, most_replicas])
        self.capacity = longest // self.page + 4 + draw.randrange(60)
        self.table: Sequence[int] = range(self.capacity + 40)
        if engine == "sglang":
            self.capacity *= self.page
            self.table = range(0, self.capacity + 40 * self.page, self.page)
        running = draw.randrange(1, 7)
        self.rules = Rules(
            SCHEDULES[engine], draw.randrange(8, 60) + running + 50 * (engine == "tensorrt-llm"), running,
            Lag(lag), sends=sends,
        )  # fmt: skip
        schedule = self.rules.schedule._replace(overlaps=draw.random() < 0.5)
        self.rules = self.rules._replace(schedule=schedule, keeps=draw.choice(["found", "nothing", "all"]))

    def server(self, arrivals: Arrivals) -> Server:
        kind: type[Replica] = PrefillFirstReplica if self.engine == "sglang" else MixedReplica
        make = partial(kind, self.rules, self.times)
        if self.ranks == 1:
            return make(BlockPool(self.capacity, self.page, self.table), arrivals)
        ranks = [make(BlockPool(self.capacity, self.page, self.table), OfRank(arrivals)) for _ in range(self.ranks)]
        return LockStep(ROUTERS[self.engine](ranks), self.times, arrivals)

    def instances(self) -> list[Instance]:
        def units(tokens: int) -> int:
            return self.table[-(-tokens // self.page)]

        found = []
        for _ in range(self.number):
            servers = [
                reference.Server(self.rules, self.capacity, self.page, units, self.engine) for _ in range(self.ranks)
            ]
            alone = self.ranks == 1
            route = one_by_one if alone else Routes(self.engine)
            found.append(Instance(servers, self.times.step if alone else self.times.of_parts, route))
        return found


@pytest.mark.parametrize("part", range(2))
def test_many_steps_at_once_give_what_single_steps_give(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[int, tuple[Any, ...]] = {}
    join = coupled._join

    def joined(prompt: Request, answer: Request) -> None:
        """What happened on the decode instance, before what happened on the prefill instance is added."""
        times = answer.arrival, answer.started, answer.first_token, answer.finish, answer.preemptions
        answers[answer.number] = times
        join(prompt, answer)

    monkeypatch.setattr(coupled, "_join", joined)
    waited = closed = preempted = 0
    for seed in range(part * 50, part * 50 + 50):
        draw = Random(seed)
        lengths = [(draw.randrange(1, 50), draw.randrange(1, 40)) for _ in range(draw.randrange(1, 40))]
        lag, seconds = draw.choice([0.0, 0.25]), draw.choice([0.0, 1 / 64, 1 / 4])
        prefill = Pool(draw, draw.choice(["vllm", "sglang", "tensorrt-llm"]), 52, lag, 2, sends=True)
        decode = Pool(draw, draw.choice(["vllm", "tensorrt-llm"]), 92, lag, 3)
        clients = draw.randrange(1, 20) if draw.random() < 0.6 else None
        at = sorted(0.0 if clients else place * draw.choice([0.0, 0.25, 0.5]) for place in range(len(lengths)))
        requests = [Request(n, at[n], *pair) for n, pair in enumerate(lengths)]
        jobs = [Job(at[n], *pair, number=n) for n, pair in enumerate(lengths)]
        # A token has `seconds` bytes of a 64th of a second each.
        link = Link(64, lambda tokens, seconds=seconds: int(64 * tokens * seconds / 4))  # type: ignore[misc]
        pools = Coupled(
            supply_of(requests), (prefill.number, prefill.server), (decode.number, decode.server), link, clients
        )
        pools.run(None)
        expected = serve_apart(
            (prefill.instances(), decode.instances()), jobs, clients, lambda tokens: link.bytes_of(tokens) / 64, lag  # noqa: B023
        )  # fmt: skip
        for number, job in enumerate(expected):
            assert answers[number] == (job.arrival, job.started, job.first_token, job.finish, job.preemptions), (
                f"case {seed}"
            )
            waited, preempted = waited + (job.started != job.arrival), preempted + job.preemptions
        assert [request.arrival for request in requests] == [job.arrival for job in jobs]
        for server in (*pools.prefills, *pools.decodes):
            for rank in server.ranks:
                assert rank.pool.used == 0
                assert rank.pool.most_used <= (rank.pool.capacity or 0)
        closed += clients is not None
    assert min(waited, closed, preempted) > 20


class FixedServer:
    """An instance that ends each request at a fixed time."""

    def __init__(self, ends: dict[int, float], arrivals: Arrivals) -> None:
        self.ends, self.arrivals = ends, arrivals

    def next_event(self) -> float:
        return inf if self.arrivals.next_arrival is None else self.arrivals.next_arrival

    def advance(self) -> None:
        for request in self.arrivals.receive(self.next_event()):
            request.started = request.arrival
            request.first_token = request.finish = self.ends.get(request.number, request.arrival)
            self.arrivals.finished(request)

    def check(self) -> None:
        pass

    def sent(self, request: Request, end: float) -> None:
        pass

    def free_sent(self, until: float) -> None:
        pass


def test_a_link_carries_one_cache_at_a_time() -> None:
    ends = {0: 1.0, 1: 1.1, 2: 1.2, 3: 9.0}

    def sent(decodes: int) -> list[tuple[float, float]]:
        requests = [Request(number, 0.0, 100, 1) for number in range(4)]
        # Two senders: 0 and 2 from the first, 1 and 3 from the second. 100 bytes at 50 bytes per second.
        make: Any = lambda arrivals, ends=ends: FixedServer(ends, arrivals)  # noqa: E731
        pools = Coupled(
            supply_of(requests), (2, make), (decodes, partial(make, ends={})), Link(50, lambda tokens: tokens)
        )
        pools.run(None)
        return [(one.start, one.end) for one in pools.sent]

    assert sent(1) == [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0), (9.0, 11.0)]
    # With two receivers, the second cache has a link of its own, and the third waits for its sender.
    assert sent(2) == [(1.0, 3.0), (1.1, 3.1), (3.0, 5.0), (9.0, 11.0)]


def test_blocks_are_added_up_and_progress_is_told_while_instances_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every two events: a request, its prompt, its sending, its answer, and that at the client.

    A cache is sent in two seconds.
    """
    monkeypatch.setattr("kvcalc.simulation.together._RECOUNT_EVERY", 2)
    checks: list[int] = []

    class Counted(FixedServer):
        finished = 0

        def advance(self) -> None:
            super().advance()
            self.finished += 1

        def check(self) -> None:
            checks.append(self.finished)

    make: Any = partial(Counted, {})
    told: list[tuple[int, int]] = []
    requests = [Request(number, float(number), 100, 1) for number in range(4)]
    pools = Coupled(supply_of(requests), (1, make), (1, make), Link(50, lambda tokens: tokens))
    pools.run(None, lambda *done: told.append(done))
    # Each of four requests arrives too, which is an event: three prompts, an answer, a prompt and three answers.
    assert told == [(0, 4)] * 4 + [(1, 4)] * 3 + [(2, 4), (3, 4), (4, 4)]
    assert len(checks) == 2 * (10 + 1)  # once more at the end


class OneByOne:
    """Steps of a second."""

    def prompts(self, chunks: Sequence[Any], decoding: int) -> float:
        return 1.0


@pytest.mark.parametrize(("capacity", "starts"), [(25, [0.0, 0.0, 6.0]), (10, [0.0, 6.0, 12.0]), (30, [0.0, 0.0, 0.0])])
def test_a_prompt_holds_its_blocks_until_its_cache_is_sent(capacity: int, starts: list[float]) -> None:
    requests = [Request(number, 0.0, 10, 1) for number in range(3)]
    rules = Rules(SCHEDULES["vllm"], 100, 8, sends=True)

    def prefill(arrivals: Arrivals) -> Server:
        times: Any = OneByOne()
        return MixedReplica(rules, times, BlockPool(capacity, 1, range(100)), arrivals)

    # A prompt takes a second, and its cache 5 s. Prompts that are computed together are sent one after the other.
    decode: Any = lambda arrivals: FixedServer({}, arrivals)  # noqa: E731
    pools = Coupled(supply_of(requests), (1, prefill), (2, decode), Link(2, lambda tokens: tokens))
    pools.run(None)
    assert [prompt.started for prompt in pools.prompts] == starts
    assert max(rank.pool.most_used for server in pools.prefills for rank in server.ranks) <= capacity


def finished(number: int, at: float) -> Request:
    request = Request(number, 0.0, 100, 1)
    request.started, request.finish = 0.0, at
    return request


def test_a_request_that_is_lost_or_early_is_found() -> None:
    prompts = [finished(0, 1.0), finished(1, 2.0)]
    sent = [Sending(prompts[0], 100, 1.0, 3.0), Sending(prompts[1], 100, 3.0, 5.0)]
    answers = [finished(0, 9.0), finished(1, 9.0)]
    for answer in answers:
        answer.first_token = 8.0
    check_conservation(prompts, sent, answers)
    with pytest.raises(PoolError, match="2 requests arrived, but 1 were sent"):
        check_conservation(prompts, sent[:1], answers)
    answers[1].first_token = 3.5  # before its cache has arrived
    with pytest.raises(PoolError, match="request 1"):
        check_conservation(prompts, sent, answers)
