"""Which DP rank gets a request (`Schedule.routing`). The sources are in `kvcalc.engines`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from kvcalc.engines.scheduler import FEWEST_TOKENS, LEAST_LOADED, ROUND_ROBIN
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.replica import Replica


class Router(ABC):
    """Gives the requests in `queue` to `ranks`, as far as it may."""

    def __init__(self, ranks: Sequence[Replica]) -> None:
        self.ranks = ranks
        self.queue: deque[Request] = deque()

    @abstractmethod
    def route(self) -> None:
        """Give the requests in the queue to the ranks. Those that none may have yet stay."""

    def needs_arrivals(self) -> bool:
        """Whether a request that arrives while decode steps run changes anything before they end."""
        return any(not rank.waiting and len(rank.running) < rank.rules.max_running for rank in self.ranks)


class RoundRobin(Router):
    """In turn."""

    _next = 0

    def route(self) -> None:
        while self.queue:
            self.ranks[self._next].waiting.append(self.queue.popleft())
            self._next = (self._next + 1) % len(self.ranks)


class LeastLoaded(Router):
    """To the rank with the fewest unfinished requests.

    Waiting ones count up to four times if more than half of the cache is used. The search begins one rank later for
    each request.
    """

    _first = 0

    def route(self) -> None:
        number = len(self.ranks)
        while self.queue:
            order = (self.ranks[(self._first + place) % number] for place in range(number))
            min(order, key=self._load).waiting.append(self.queue.popleft())
            self._first = (self._first + 1) % number

    def needs_arrivals(self) -> bool:
        return True  # the use of the caches is that of the moment

    def _load(self, rank: Replica) -> float:
        waiting, pool = len(rank.waiting), rank.pool
        usage = pool.used / pool.capacity if pool.capacity else 0.0
        return len(rank.running) + waiting + waiting * 6.0 * max(0.0, usage - 0.5)


class FewestTokens(Router):
    """The longest prompt first, to the rank with the fewest tokens of prompts if it has fewer requests than the mean.

    A rank gets no more requests than it may run; the others wait for all of them.
    """

    def route(self) -> None:
        if not self.queue:
            return
        most = self.ranks[0].rules.max_running
        active = [[*rank.running, *rank.waiting] for rank in self.ranks]
        room = sum(max(most - len(requests), 0) for requests in active)
        new = sorted([self.queue.popleft() for _ in range(min(room, len(self.queue)))], key=_prompt, reverse=True)
        if not new:
            return
        total = sum(map(len, active)) + len(new)
        expected = min(max(-(-total // len(self.ranks)), *map(len, active)), most)
        loads = [(sum(map(_prompt, requests)), len(requests), place) for place, requests in enumerate(active)]
        loads = [load for load in loads if load[1] < expected]
        for request in new:
            tokens, number, place = min(loads)
            loads.remove((tokens, number, place))
            if number + 1 < expected:
                loads.append((tokens + request.prompt_tokens, number + 1, place))
            self.ranks[place].waiting.append(request)

    def needs_arrivals(self) -> bool:
        return any(len(rank.running) + len(rank.waiting) < rank.rules.max_running for rank in self.ranks)


ROUTERS: dict[str, type[Router]] = {
    ROUND_ROBIN: RoundRobin, LEAST_LOADED: LeastLoaded, FEWEST_TOKENS: FewestTokens,
}  # fmt: skip


def _prompt(request: Request) -> int:
    return request.prompt_tokens
