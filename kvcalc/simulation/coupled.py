"""Prefill and decode instances that work together: prompts are computed, sent and answered, in the order of time.

Every server runs on its own until it must know what the others do: a server that plans its next step must have all
requests that arrived before, and decode steps that are planned end early if a request arrives. So the server whose
`next_event` is the earliest goes on. On a prefill instance, a request ends with its first token. Then its cache is
sent: the link of every instance carries one cache at a time, in the order in which the prompts are completed. The
instance holds it until it is sent (request_finished, nixl/pull_scheduler.py of vLLM 0.33.0;
process_disagg_prefill_inflight_queue, srt/disaggregation/prefill.py of SGLang 0.5.23; _handle_responses,
_torch/pyexecutor/py_executor.py of TensorRT-LLM 1.3). On the decode instance, the request starts with the cache of all
tokens but the last one, so the first step gives a token. In a closed loop, the client then sends its next request.
Requests go to the instances of a pool in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf

from kvcalc.records import NamedTuple
from kvcalc.simulation.fleet import Fleet, Progress
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.pool import PoolError
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.server import Server


class Sending(NamedTuple):
    """The cache of a request on its way: its bytes on the busiest device, and when it starts and arrives."""

    request: Request
    num_bytes: int
    start: float
    end: float


class Link(NamedTuple):
    """The link of each instance: bytes per second, and how many bytes the busiest device moves for a prompt."""

    bytes_per_second: int
    bytes_of: Callable[[int], int]


class Inbox(Arrivals):
    """The requests of one instance. What it has finished is put on the list of events, with its place in `order`."""

    def __init__(self, events: list[_Event], order: int) -> None:
        super().__init__(())
        self._events, self._order = events, order

    def finished(self, request: Request) -> None:
        heappush(self._events, (request.finish or 0.0, self._order, request.number, request))


_Event = tuple[float, int, int, Request]
# Events at the same time: a cache is sent, a request is answered, a client sends its next request.
_COMPUTED, _ANSWERED, _READY = range(3)
_RECOUNT_EVERY = 4096


class Coupled(Fleet):
    """The requests of a load on both pools. `clients` send them after answers, else they have times.

    `prefills` and `decodes` make the servers of a pool with these inboxes. After `run`, `prompts`, `sent` and `answers`
    are what happened on the prefill instances, between them and on the decode instances, numbered from 0 in the order
    in which they were asked. A request of the load is only the question; its `arrival` is set in a closed loop.
    """

    def __init__(
        self, supply: Supply, prefills: tuple[int, Callable[[Arrivals], Server]],
        decodes: tuple[int, Callable[[Arrivals], Server]], link: Link, clients: int | None = None,
    ) -> None:  # fmt: skip
        self._supply, self._link, self._is_closed = supply, link, clients is not None
        self._events: list[_Event] = []
        self._asked: list[Request] = []
        self.prefills, self.decodes = (
            [make(Inbox(self._events, order)) for _ in range(number)]
            for order, (number, make) in ((_COMPUTED, prefills), (_ANSWERED, decodes))
        )
        self.prompts: list[Request] = []
        self.sent: list[Sending] = []
        self.answers: list[Request] = []
        self._ended: list[Request] = []
        self._senders, self._receivers = [0.0] * len(self.prefills), [0.0] * len(self.decodes)
        # Decode instances first: of two events at the same time, an answer comes before the next request of a client.
        self._servers = [*self.decodes, *self.prefills]
        self._times = [inf] * len(self._servers)
        for request in islice(supply, 1 if clients is None else clients):
            self._expect(request)

    @property
    def ranks(self) -> Sequence[Replica]:
        return [rank for server in self.decodes for rank in server.ranks]

    @property
    def ended(self) -> Sequence[Request]:
        return self._ended

    def run(self, number: int | None, progress: Progress | None = None) -> None:
        """Run until so many requests have their answers. PoolError if one is lost, or if blocks are."""
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
            for server in self.prefills:
                server.free_sent(inf)
            check_conservation(self._asked, self.sent, self.answers)
        self._check()

    def _check(self) -> None:
        for server in self._servers:
            server.check()

    def _retime(self, place: int) -> None:
        self._times[place] = self._servers[place].next_event()

    def _expect(self, request: Request) -> None:
        heappush(self._events, (request.arrival, _READY, request.number, request))

    def _ask(self, request: Request) -> None:
        """A client sends a request to the next prefill instance."""
        number = request.number = len(self.prompts)
        self._asked.append(request)
        self.prompts.append(
            Request(number, request.arrival, request.prompt_tokens, 1, request.cached_tokens, request.names)
        )
        place = number % len(self.prefills)
        self.prefills[place].arrivals.add(self.prompts[-1])
        self._retime(len(self.decodes) + place)
        later = None if self._is_closed else next(self._supply, None)
        if later is not None:
            self._expect(later)

    def _handle(self, now: float, order: int, number: int, request: Request) -> None:
        if order == _COMPUTED:
            self._send(request)
        elif order == _READY:
            self._ask(request)
        else:
            prompt = self.prompts[number]
            _join(prompt, request)
            self._ended.append(request)
            following = self._asked[number].following(self._supply if self._is_closed else None)
            if following is not None:
                # The client gets the answer later than the engine has it, by the host time of both instances.
                following.arrival += now + request.lag
                self._expect(following)

    def _send(self, prompt: Request) -> None:
        asked, place = self._asked[prompt.number], len(self.sent) % len(self.decodes)
        sender, num_bytes = prompt.number % len(self.prefills), self._link.bytes_of(prompt.prompt_tokens)
        start = max(prompt.finish or 0.0, self._senders[sender], self._receivers[place])
        end = start + num_bytes / self._link.bytes_per_second
        self._senders[sender] = self._receivers[place] = end
        self.prefills[sender].sent(prompt, end)
        self.sent.append(Sending(prompt, num_bytes, start, end))
        tokens = asked.prompt_tokens
        # The cache of the prompt is there, and the last token is computed again.
        self.answers.append(Request(asked.number, end, tokens, asked.answer_tokens, tokens - 1))
        self.decodes[place].arrivals.add(self.answers[-1])
        self._retime(place)


def _join(prompt: Request, answer: Request) -> None:
    """Add what happened on the prefill instance to a request that was answered."""
    answer.arrival, answer.started, answer.found_tokens = prompt.arrival, prompt.started, prompt.found_tokens
    answer.lag += prompt.lag
    answer.preemptions += prompt.preemptions


def check_conservation(requests: Sequence[Request], sent: Sequence[Sending], answers: Sequence[Request]) -> None:
    """Every request is computed, sent and answered once, in this order. PoolError if it is not."""
    numbers = [request.number for request in requests]
    if sorted(one.request.number for one in sent) != numbers:
        raise PoolError(f"{len(requests)} requests arrived, but {len(sent)} were sent")
    for one, answer in zip(sent, answers):
        times = one.request.arrival, one.request.finish, one.start, one.end, answer.first_token, answer.finish
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(times) or known != sorted(known):
            raise PoolError(f"request {one.request.number} was not computed, sent and answered in this order")
