"""A replica that runs one request at a time is a queue whose mean wait is known, and every queue obeys Little's law."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

import pytest

from kvcalc.engines.scheduler import Schedule
from kvcalc.simulation.loads.arrivals import Arrivals, poisson_times
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.mixed import MixedReplica
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, Line

SERVICE = 1.0
TOKENS = 10_000  # of a request whose service takes one second
REQUESTS = 100_000

ONE_AT_A_TIME = Rules(Schedule("test", reserves_answer=True), 2**40, 1)


class PromptTimes:
    """A prompt takes time, and nothing else."""

    def line(self, batch: int, context: int) -> Line:
        raise AssertionError("an answer of one token needs no decode step")

    def prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return sum(end - start for start, end in chunks) * SERVICE / TOKENS


def served(lengths: list[int], load: float, seed: int) -> list[Request]:
    times = islice(poisson_times(load / SERVICE, Random(seed)), len(lengths))
    requests = [Request(number, at, tokens, 1) for number, (at, tokens) in enumerate(zip(times, lengths))]
    MixedReplica(ONE_AT_A_TIME, PromptTimes(), BlockPool(None), Arrivals(requests)).run()
    return requests


def mean_wait(requests: list[Request]) -> float:
    waits = [request.started - request.arrival for request in requests if request.started is not None]
    assert len(waits) == len(requests)
    return sum(waits) / len(waits)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_constant_service_waits_as_in_m_d_1(load: float) -> None:
    found = mean_wait(served([TOKENS] * REQUESTS, load, seed=1))
    assert found == pytest.approx(load / (2 * (1 - load)) * SERVICE, rel=0.04)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.8])
def test_exponential_service_waits_as_in_m_m_1(load: float) -> None:
    draw = Random(2)
    lengths = [max(1, round(draw.expovariate(1 / TOKENS))) for _ in range(REQUESTS)]
    found = mean_wait(served(lengths, load, seed=3))
    # The standard error of the mean of 100,000 waits is 3.5 % at a load of 0.8 (Whitt, Operations Research 1989).
    assert found == pytest.approx(load / (1 - load) * SERVICE, rel=0.1 if load > 0.5 else 0.05)


def test_requests_of_bursts_wait_longer_and_of_a_regular_stream_shorter() -> None:
    waits = []
    for burstiness in (0.25, 1.0, 4.0):
        times = islice(poisson_times(0.6, Random(5), burstiness), 20_000)
        requests = [Request(number, at, TOKENS, 1) for number, at in enumerate(times)]
        assert requests[-1].arrival == pytest.approx(20_000 / 0.6, rel=0.05)
        MixedReplica(ONE_AT_A_TIME, PromptTimes(), BlockPool(None), Arrivals(requests)).run()
        waits.append(mean_wait(requests))
    assert waits == sorted(waits, reverse=True)


class DecodeTimes(PromptTimes):
    def line(self, batch: int, context: int) -> Line:
        return Line(0.01 + 0.001 * batch, 1e-6, 2**40)


def test_littles_law_holds_for_the_requests_in_the_system() -> None:
    draw = Random(4)
    times = islice(poisson_times(2.0, Random(7)), 3000)
    requests = [Request(n, at, draw.randrange(1, 2000), draw.randrange(1, 200)) for n, at in enumerate(times)]
    pool = BlockPool(4000, 16, range(1000))
    replica = MixedReplica(Rules(Schedule("test", overlaps=True), 512, 16), DecodeTimes(), pool, Arrivals(requests))
    replica.run()
    ends = sorted(request.finish or 0.0 for request in requests)
    # The number in the system, added up from the arrivals and the departures as they follow each other.
    number, area, before = 0, 0.0, 0.0
    for seconds, change in sorted([*((r.arrival, 1) for r in requests), *((end, -1) for end in ends)]):
        area += number * (seconds - before)
        number, before = number + change, seconds
    spent = sum((request.finish or 0.0) - request.arrival for request in requests)
    assert area == pytest.approx(spent)
    in_queue = sum((request.started or 0.0) - request.arrival for request in requests)
    # What the replica added up while it ran is the rest, but for the time in which a preempted request waits again.
    assert replica.preemptions == 0
    assert replica.timeline.running_seconds == pytest.approx(spent - in_queue)
