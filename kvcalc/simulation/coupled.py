"""Prefill and decode instances that work together: prompts are computed, sent and answered, in the order of time.

On a prefill instance, a request ends with its first token. Then its cache is sent: the link of every instance carries
one cache at a time, in the order in which the prompts are completed. The instance holds it until it is sent
(request_finished, nixl/pull_scheduler.py of vLLM 0.33.0; process_disagg_prefill_inflight_queue,
srt/disaggregation/prefill.py of SGLang 0.5.23; _handle_responses, _torch/pyexecutor/py_executor.py of TensorRT-LLM
1.3). On the decode instance, the request starts with the cache of all tokens but the last one, so the first step gives
a token. In a closed loop, the client then sends its next request. Requests go to the instances of a pool in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.pool import PoolError
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.together import ANSWERED, ARRIVES, COMPUTED, Inbox, Together


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


class Coupled(Together):
    """The requests of a load on both pools. `clients` send them after answers, else they have times.

    `prefills` and `decodes` make the servers of a pool with these inboxes. After `run`, `prompts`, `sent` and `answers`
    are what happened on the prefill instances, between them and on the decode instances, numbered from 0 in the order
    in which they were asked. A request of the load is only the question; its `arrival` is set in a closed loop.
    """

    def __init__(
        self, supply: Supply, prefills: tuple[int, Callable[[Arrivals], Server]],
        decodes: tuple[int, Callable[[Arrivals], Server]], link: Link, clients: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(supply, clients)
        self._link = link
        self._asked: list[Request] = []
        self.prefills, self.decodes = (
            [make(Inbox(self._events, order)) for _ in range(number)]
            for order, (number, make) in ((COMPUTED, prefills), (ANSWERED, decodes))
        )
        self.prompts: list[Request] = []
        self.sent: list[Sending] = []
        self.answers: list[Request] = []
        self._senders, self._receivers = [0.0] * len(self.prefills), [0.0] * len(self.decodes)
        # Decode instances first: of two events at the same time, an answer comes before the next request of a client.
        self._start([*self.decodes, *self.prefills])

    @property
    def ranks(self) -> Sequence[Replica]:
        return [rank for server in self.decodes for rank in server.ranks]

    def _end(self) -> None:
        for server in self.prefills:
            server.free_sent(inf)
        check_conservation(self._asked, self.sent, self.answers)

    def _ask(self, request: Request) -> None:
        """A client sends a request to the next prefill instance."""
        number = request.number = len(self.prompts)
        self._asked.append(request)
        self.prompts.append(
            Request(number, request.arrival, request.prompt_tokens, 1, request.cached_tokens, request.names)
        )
        self._give(len(self.decodes) + number % len(self.prefills), self.prompts[-1])
        self._expect_another()

    def _handle(self, now: float, order: int, number: int, request: Request) -> None:
        if order == COMPUTED:
            self._send(request)
        elif order == ARRIVES:
            self._ask(request)
        else:
            # The client gets the answer later than the engine has it, by the host time of both instances.
            _join(self.prompts[number], request)
            self._answer(self._asked[number], request, now)

    def _send(self, prompt: Request) -> None:
        request, place = self._asked[prompt.number], len(self.sent) % len(self.decodes)
        sender, num_bytes = prompt.number % len(self.prefills), self._link.bytes_of(prompt.prompt_tokens)
        start = max(prompt.finish or 0.0, self._senders[sender], self._receivers[place])
        end = start + num_bytes / self._link.bytes_per_second
        self._senders[sender] = self._receivers[place] = end
        self.prefills[sender].sent(prompt, end)
        self.sent.append(Sending(prompt, num_bytes, start, end))
        tokens = request.prompt_tokens
        # The cache of the prompt is there, and the last token is computed again.
        self.answers.append(Request(request.number, end, tokens, request.answer_tokens, tokens - 1))
        self._give(place, self.answers[-1])


def _join(prompt: Request, answer: Request) -> None:
    """Add what happened on the prefill instance to a request that was answered."""
    answer.arrival, answer.started, answer.found_tokens = prompt.arrival, prompt.started, prompt.found_tokens
    answer.lag += prompt.lag
    answer.preemptions += prompt.preemptions


def check_conservation(requests: Sequence[Request], sent: Sequence[Sending], answers: Sequence[Request]) -> None:
    """Every request is computed, sent and answered once, in this order. PoolError if it is not."""
    numbers = [request.number for request in requests]
    if sorted(sending.request.number for sending in sent) != numbers:
        raise PoolError(f"{len(requests)} requests arrived, but {len(sent)} were sent")
    for sending, answer in zip(sent, answers):
        times = (
            sending.request.arrival,
            sending.request.finish,
            sending.start,
            sending.end,
            answer.first_token,
            answer.finish,
        )
        known = [seconds for seconds in times if seconds is not None]
        if len(known) < len(times) or known != sorted(known):
            raise PoolError(f"request {sending.request.number} was not computed, sent and answered in this order")
