"""Replicas behind a router that gives each request to one of them when it arrives.

The router knows what it has sent and which answers have ended, as a client of the replicas does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from functools import partial
from random import Random

from kvcalc.question.fields import AT_RANDOM, IN_TURN, ROUTERS
from kvcalc.simulation.fleet import Fleet, Progress
from kvcalc.simulation.loads.arrivals import Arrivals, Division
from kvcalc.simulation.loads.load import split_concurrency
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.together import ANSWERED, ARRIVES, Inbox, Together


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
        # The number of the last request with each name.
        self._sent: list[dict[int, int]] = [{} for _ in range(number)]

    def choose(self, request: Request) -> int:
        place = self._place(request)
        self._sent[place].update(dict.fromkeys(request.names, request.number))
        return place

    def _place(self, request: Request) -> int:
        most, least = max(self.unfinished), min(self.unfinished)
        if (most - least > self._FARTHEST and most > self._TIMES * least) or not request.names:
            return self.shortest()
        lengths = [_begins_with(request.names, sent) for sent in self._sent]
        # A session that went on at another replica is there.
        best = max(range(len(lengths)), key=lambda place: (lengths[place], self._sent[place].get(request.names[0], -1)))
        if lengths[best] * (self.block_tokens or 0) > self._LEAST_SHARE * request.prompt_tokens:
            return best
        return min(range(len(lengths)), key=lambda place: (len(self._sent[place]), self.unfinished[place]))


def _begins_with(names: Sequence[int], sent: Container[int]) -> int:
    """How many of the first names were sent."""
    for place, name in enumerate(names):
        if name not in sent:
            return place
    return len(names)


_KINDS: dict[str, type[Router]] = dict(zip(ROUTERS, (InTurn, AtRandom, Least, PrefixAware)))


def fleet_of(
    supply: Supply, number: int, make: Callable[[Arrivals], Server], router: str, seed: int = 0,
    block_tokens: int | None = None, clients: int | None = None,
) -> Fleet:  # fmt: skip
    """At most `number` replicas for the requests of a load, each sent where the router says.

    `block_tokens` are the tokens in a named block of the prompts. `clients` send requests after answers; without them,
    requests have times of their own.
    """
    chosen = _KINDS[router](number, seed, block_tokens)
    if number == 1 or router == IN_TURN or (router == AT_RANDOM and clients is None):
        return Alone(supply, number, make, chosen, clients)
    return Routed(supply, number, make, chosen, clients)


class Alone(Fleet):
    """Replicas of which none sees what the others do: what one gets depends on no other one."""

    def __init__(
        self, supply: Supply, number: int, make: Callable[[Arrivals], Server], router: Router, clients: int | None
    ) -> None:
        division, self._supply = Division(supply, number, router.choose), supply
        parts = zip(map(division.of, range(number)), split_concurrency(clients, number))
        inboxes = [Arrivals(requests, each) for requests, each in parts]
        # What a replica gets of a short trace may be nothing.
        self.servers = [make(arrivals) for arrivals in inboxes if arrivals.next_arrival is not None]

    @property
    def ranks(self) -> Sequence[Replica]:
        return [rank for server in self.servers for rank in server.ranks]

    def run(self, number: int | None, progress: Progress | None = None) -> None:
        each = None if number is None else -(-number // len(self.servers))
        for server in self.servers:
            before, of = self._finished() - server.finished, number or self._supply.number or 0
            server.run(None if progress is None else partial(_report, progress, before, of), each)

    @property
    def ended(self) -> Sequence[Request]:
        if len(self.servers) == 1:
            return self.servers[0].arrivals.ended
        ended = [request for server in self.servers for request in server.arrivals.ended]
        return sorted(ended, key=lambda request: request.finish or 0.0)

    def _finished(self) -> int:
        return sum(server.finished for server in self.servers)


def _report(progress: Progress, before: int, of: int, finished: int) -> None:
    progress(before + finished, of)


class Routed(Together):
    """Replicas that `make` makes, behind a router that knows all of them."""

    def __init__(
        self, supply: Supply, number: int, make: Callable[[Arrivals], Server], router: Router, clients: int | None
    ) -> None:
        super().__init__(supply, clients)
        self._router, self._places = router, dict[int, int]()
        self.replicas = [make(Inbox(self._events, ANSWERED)) for _ in range(number)]
        self._start(self.replicas)

    @property
    def ranks(self) -> Sequence[Replica]:
        return [rank for replica in self.replicas for rank in replica.ranks]

    def _handle(self, now: float, order: int, number: int, request: Request) -> None:
        if order == ARRIVES:
            place = self._places[number] = self._router.choose(request)
            self._router.unfinished[place] += 1
            self._give(place, request)
            self._expect_another()
        else:
            self._router.unfinished[self._places.pop(number)] -= 1
            self._answer(request, request, now)
