"""When requests arrive: in a closed loop, at random with a mean rate, or at the times of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

from kvcalc.simulation.loads.requests import Request


class Arrivals:
    """The requests that have not been received, in the order of their arrival.

    With `concurrency`, that many requests arrive at the start, and another one whenever a client has an answer. Without
    it, requests have their own times.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None) -> None:
        self._later: Iterator[Request] = iter(requests)
        self._coming: deque[Request] = deque()
        self._is_closed = concurrency is not None
        if concurrency is None:
            self._coming.extend(self._later)
        else:
            self._coming.extend(islice(self._later, concurrency))  # they arrive at 0

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives. None if no more are known to come."""
        return self._coming[0].arrival if self._coming else None

    def receive(self, until: float) -> Iterator[Request]:
        """Take the requests that have arrived by `until`."""
        coming = self._coming
        while coming and coming[0].arrival <= until:
            yield coming.popleft()

    def waiting(self, now: float) -> int:
        """The requests that have arrived by `now` and have not been received."""
        found = 0
        for request in self._coming:
            if request.arrival > now:
                break
            found += 1
        return found

    def finished(self, request: Request) -> None:
        """A client has its answer, and in a closed loop sends the next request."""
        if self._is_closed:
            following = next(self._later, None)
            if following is not None:
                following.arrival = (request.finish or 0.0) + request.lag
                self.add(following)

    def add(self, request: Request) -> None:
        """A request will arrive. Those that were added before may arrive later."""
        place = len(self._coming)
        while place and self._coming[place - 1].arrival > request.arrival:
            place -= 1
        self._coming.insert(place, request)


def poisson_times(rate: float, random: Random, burstiness: float = 1.0) -> Iterator[float]:
    """Arrival times with a mean `rate` per second, without end.

    The times between arrivals have a gamma distribution with shape `burstiness`: 1 is a Poisson process, less comes in
    bursts, more is more regular. The word and its meaning are those of `vllm bench serve` (benchmarks/serve.py).
    """
    now = 0.0
    while True:
        now += random.gammavariate(burstiness, 1 / (rate * burstiness)) if burstiness != 1 else random.expovariate(rate)
        yield now
