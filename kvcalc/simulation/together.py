"""Servers that depend on each other: each runs as far as it can without knowing what the others do.

A server that plans its next step must have all requests that arrived before, and decode steps that are planned end
early if a request arrives. So the server whose `next_event` is the earliest goes on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf

from kvcalc.simulation.fleet import Fleet, Progress
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.server import Server

Event = tuple[float, int, int, Request]
# Events at the same time: a prompt is computed, a request is answered, a client sends its next request.
COMPUTED, ANSWERED, ARRIVES = range(3)
_RECOUNT_EVERY = 4096


class Inbox(Arrivals):
    """The requests of one server. What it has finished is put on the list of events, with its place in `order`."""

    def __init__(self, events: list[Event], order: int) -> None:
        super().__init__(())
        self._events, self._order = events, order

    def finished(self, request: Request) -> None:
        heappush(self._events, (request.finish or 0.0, self._order, request.number, request))


class Together(Fleet):
    """The requests of a load on servers with inboxes. `clients` send them after answers, else they have times.

    A subclass makes the servers, calls `_start` with them, and says what follows from an event.
    """

    def __init__(self, supply: Supply, clients: int | None) -> None:
        self._supply, self._is_closed = supply, clients is not None
        self._events: list[Event] = []
        self._ended: list[Request] = []
        self._first = [*islice(supply, 1 if clients is None else clients)]

    def _start(self, servers: Sequence[Server]) -> None:
        self._servers, self._times = servers, [inf] * len(servers)
        for request in self._first:
            self._expect(request)

    @property
    def ended(self) -> Sequence[Request]:
        return self._ended

    def run(self, number: int | None, progress: Progress | None = None) -> None:
        """Run until so many requests have ended. PoolError if blocks are lost."""
        events, times, rounds = self._events, self._times, 0
        while number is None or len(self._ended) < number:
            first = min(times)
            if events and events[0][0] <= first:
                self._handle(*heappop(events))
            elif first < inf:
                place = times.index(first)
                self._servers[place].advance()
                self._retime(place)
            else:
                break
            rounds += 1
            if rounds % _RECOUNT_EVERY == 0:
                self._check()
                if progress is not None:
                    progress(len(self._ended), number or self._supply.number or 0)
        if number is None:
            self._end()
        self._check()

    @abstractmethod
    def _handle(self, now: float, order: int, number: int, request: Request) -> None:
        """What follows from an event."""

    def _end(self) -> None:
        """All requests have ended."""

    def _check(self) -> None:
        for server in self._servers:
            server.check()

    def _give(self, place: int, request: Request) -> None:
        """A server gets a request."""
        self._servers[place].arrivals.add(request)
        self._retime(place)

    def _retime(self, place: int) -> None:
        self._times[place] = self._servers[place].next_event()

    def _expect(self, request: Request) -> None:
        heappush(self._events, (request.arrival, ARRIVES, request.number, request))

    def _expect_another(self) -> None:
        """A request has arrived. If requests have times of their own, the next one will."""
        later = None if self._is_closed else next(self._supply, None)
        if later is not None:
            self._expect(later)

    def _answer(self, request: Request, answer: Request, now: float) -> None:
        """The client of `request` has its answer, and perhaps sends another one when it has thought."""
        self._ended.append(answer)
        following = request.following(self._supply if self._is_closed else None)
        if following is not None:
            following.arrival += now + answer.lag
            self._expect(following)
