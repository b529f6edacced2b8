"""When requests arrive: after the answers of their clients, at random with a mean rate, or as in a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from random import Random

from kvcalc.simulation.loads.requests import Request

# Requests with times of their own are taken from the load in groups of this many.
_GROUP = 32


class Arrivals:
    """The requests that have not been received, in the order of their arrival, and those that have `ended`.

    With `concurrency`, that many requests arrive at the start, and another one whenever a client has an answer. Without
    it, requests have their own times. `requests` may have no end.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None) -> None:
        self._later: Iterator[Request] = iter(requests)
        self._is_closed = concurrency is not None
        self._coming: deque[Request] = deque()
        self._take(_GROUP if concurrency is None else concurrency)
        self.ended: list[Request] = []

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives. None if no more are known to come."""
        return self._coming[0].arrival if self._coming else None

    def receive(self, until: float) -> Iterator[Request]:
        """Take the requests that have arrived by `until`."""
        coming = self._coming
        while coming and coming[0].arrival <= until:
            request = coming.popleft()
            if not (coming or self._is_closed):
                self._take(_GROUP)
            yield request

    def waiting(self, now: float) -> int:
        """The requests that have arrived by `now` and have not been received."""
        coming = self._coming
        while not self._is_closed and coming and coming[-1].arrival <= now and self._take(_GROUP):
            pass
        number = 0
        for request in coming:
            if request.arrival > now:
                break
            number += 1
        return number

    def finished(self, request: Request) -> None:
        """A client has its answer. In a closed loop or a session, it sends the next request."""
        self.ended.append(request)
        following = request.following(self._later if self._is_closed else None)
        if following is not None:
            following.arrival += (request.finish or 0.0) + request.lag
            self.add(following)

    def add(self, request: Request) -> None:
        """A request will arrive. Those that were added before may arrive later."""
        place = len(self._coming)
        while place and self._coming[place - 1].arrival > request.arrival:
            place -= 1
        self._coming.insert(place, request)

    def _take(self, number: int) -> int:
        before = len(self._coming)
        self._coming.extend(islice(self._later, number))
        return len(self._coming) - before


class Division:
    """The requests of a load on their way to one of several replicas, which ask for them in any order."""

    def __init__(self, requests: Iterator[Request], number: int, choose: Callable[[Request], int]) -> None:
        self._requests, self._choose = requests, choose
        self._queues: Sequence[deque[Request]] = [deque() for _ in range(number)]

    def of(self, place: int) -> Iterator[Request]:
        """The requests of one replica."""
        queue = self._queues[place]
        while True:
            while not queue:
                request = next(self._requests, None)
                if request is None:
                    return
                self._queues[self._choose(request)].append(request)
            yield queue.popleft()


def poisson_times(rate: float, random: Random, burstiness: float = 1.0) -> Iterator[float]:
    """Arrival times with a mean `rate` per second, without end.

    The times between arrivals have a gamma distribution with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is more regular. The word and its meaning are those of `vllm bench serve` (benchmarks/serve.py).
    """
    now = 0.0
    while True:
        now += random.gammavariate(burstiness, 1 / (rate * burstiness)) if burstiness != 1 else random.expovariate(rate)
        yield now
