"""Replicas behind a router that gives each request to one of them when it arrives.

The router knows what it has sent and which answers have ended, as a client of the replicas does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from random import Random

from kvcalc.question.fields import AT_RANDOM, IN_TURN, ROUTERS
from kvcalc.simulation.coupled import Inbox, Progress
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import split_concurrency
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.server import Server

_RECOUNT_EVERY = 4096
# Events at the same time: an answer ends, and then a request arrives.
_ANSWERED, _ARRIVES = range(2)


class Router(ABC):
    """Chooses one of `number` replicas for a request. `unfinished` are the requests that each has not answered."""

    def __init__(self, number: int, seed: int, block_tokens: int | None) -> None:
        self.unfinished, self.block_tokens = [0] * number, block_tokens
        self.random = Random(seed)  # noqa: S311 - not for secrets

    @abstractmethod
    def choose(self, request: Request) -> int:
        """The replica that gets a request which arrives now."""

    def shortest(self) -> int:
        """The replica with the fewest unfinished requests. One of them at random if there are several."""
        least = min(self.unfinished)
        return self.random.choice([place for place, number in enumerate(self.unfinished) if number == least])


class InTurn(Router):
    """The next replica, as a proxy with one list of addresses does."""

    _next = -1

    def choose(self, request: Request) -> int:
        self._next = (self._next + 1) % len(self.unfinished)
        return self._next


class AtRandom(Router):
    """Any replica, as a Kubernetes Service does (kube-proxy's iptables mode; docs, virtual-ips)."""

    def choose(self, request: Request) -> int:
        return self.random.randrange(len(self.unfinished))


class Least(Router):
    """The replica with the fewest unfinished requests, as LEAST_REQUEST of Envoy and `least_conn` of nginx."""

    def choose(self, request: Request) -> int:
        return self.shortest()


class PrefixAware(Router):
    """The replica that was sent most of the prompt before, as `cache_aware` of SGLang's router (its RouterArgs).

    If that is too little of the prompt, it is the replica that was sent the fewest blocks. If the replicas are far from
    equally loaded, it is the one with the fewest unfinished requests.
    """

    _LEAST_SHARE, _FARTHEST, _TIMES = 0.3, 64, 1.5

    def __init__(self, number: int, seed: int, block_tokens: int | None) -> None:
        super().__init__(number, seed, block_tokens)
        self._sent: list[set[int]] = [set() for _ in range(number)]

    def choose(self, request: Request) -> int:
        place = self._place(request)
        self._sent[place].update(request.names)
        return place

    def _place(self, request: Request) -> int:
        most, least = max(self.unfinished), min(self.unfinished)
        if (most - least > self._FARTHEST and most > self._TIMES * least) or not request.names:
            return self.shortest()
        found = [_begins_with(request.names, sent) for sent in self._sent]
        best = max(range(len(found)), key=found.__getitem__)
        if found[best] * (self.block_tokens or 0) > self._LEAST_SHARE * request.prompt_tokens:
            return best
        return min(range(len(found)), key=lambda place: (len(self._sent[place]), self.unfinished[place]))


def _begins_with(names: Sequence[int], sent: set[int]) -> int:
    """How many of the first names were sent."""
    for place, name in enumerate(names):
        if name not in sent:
            return place
    return len(names)


_KINDS: dict[str, type[Router]] = dict(zip(ROUTERS, (InTurn, AtRandom, Least, PrefixAware)))


def serve(
    requests: Sequence[Request], number: int, make: Callable[[Arrivals], Server], router: str,
    seed: int = 0, block_tokens: int | None = None, concurrency: int | None = None, progress: Progress | None = None,
) -> list[Server]:  # fmt: skip
    """The replicas, at most `number`, after they have served all `requests`, each sent where the router says.

    `block_tokens` are the tokens in a named block of the prompts. `progress` is called with the number of finished
    requests, and of all.
    """
    chosen = _KINDS[router](number, seed, block_tokens)
    is_alone = number == 1 or router == IN_TURN or (router == AT_RANDOM and concurrency is None)
    if not is_alone:
        return Routed(requests, number, make, chosen, concurrency).run(progress)
    # What a replica gets depends on no other one.
    parts: list[list[Request]] = [[] for _ in range(number)]
    for request in requests:
        parts[chosen.choose(request)].append(request)
    servers = [
        make(Arrivals(part, clients)) for part, clients in zip(parts, split_concurrency(concurrency, number)) if part
    ]
    done = 0
    for server in servers:
        server.run(None if progress is None else partial(_report, progress, done, len(requests)))
        done += server.finished
    return servers


def _report(progress: Progress, before: int, of: int, finished: int) -> None:
    progress(before + finished, of)


class Routed:
    """`requests` on the replicas that `make` makes. With a `concurrency`, clients send them, else they have times."""

    def __init__(
        self, requests: Sequence[Request], number: int, make: Callable[[Arrivals], Server], router: Router,
        concurrency: int | None = None,
    ) -> None:  # fmt: skip
        self._requests, self._router = requests, router
        first = requests if concurrency is None else requests[:concurrency]
        self._events = [(request.arrival, _ARRIVES, request.number, request) for request in first]
        heapify(self._events)
        self._sent, self._places = len(first), dict[int, int]()
        self.replicas = [make(Inbox(self._events, _ANSWERED)) for _ in range(number)]
        self._times = [inf] * number

    def run(self, progress: Progress | None = None) -> list[Server]:
        """Run until every request has its answer, and return the replicas. PoolError if blocks are lost."""
        events, times, rounds = self._events, self._times, 0
        while True:
            first = min(times)
            if events and events[0][0] <= first:
                self._handle(*heappop(events))
            elif first < inf:
                place = times.index(first)
                self.replicas[place].advance()
                times[place] = self.replicas[place].next_event()
            else:
                break
            rounds += 1
            if rounds % _RECOUNT_EVERY == 0:
                for replica in self.replicas:
                    replica.check()
                if progress is not None:
                    progress(sum(replica.finished for replica in self.replicas), len(self._requests))
        for replica in self.replicas:
            replica.check()
        return self.replicas

    def _handle(self, now: float, order: int, number: int, request: Request) -> None:
        if order == _ARRIVES:
            place = self._places[number] = self._router.choose(request)
            self._router.unfinished[place] += 1
            self.replicas[place].arrivals.add(request)
            self._times[place] = self.replicas[place].next_event()
            return
        self._router.unfinished[self._places.pop(number)] -= 1
        if self._sent < len(self._requests):
            following = self._requests[self._sent]
            self._sent += 1
            following.arrival = now + request.lag
            heappush(self._events, (following.arrival, _ARRIVES, following.number, following))
