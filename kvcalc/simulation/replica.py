"""One replica of an engine: its clock, its requests, and the steps it runs.

The clock advances all decode steps between two events at once. Events are the arrival of a request that may be
admitted, the end of one, a chunk of a prompt, and a pool without blocks for the next step. The context of the steps
grows by the tokens of a step (`pace`) per request, and their times are summed in closed form.

A subclass has the rules by which one engine schedules: `plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.pace import Pace
from kvcalc.simulation.pool import BlockPool, PoolError
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Rules
from kvcalc.simulation.timeline import Sample, Timeline, TokenGaps
from kvcalc.simulation.times import Chunk, StepTimes, run_seconds, steps_until

VERY_MANY = 2**62

Plan = tuple[list[tuple[Request, Chunk]], int]
"""The chunks that the next step computes, and how many steps may follow without another plan.

The steps are 1 if there are chunks, and 0 if nothing can run.
"""


class Replica(ABC):
    """The state of an engine, and its run until no request is left.

    `running` has the running requests in the order in which they started: those that decode, and those whose prompts
    are not computed completely. `context` is the summed tokens of all decoding requests in the next step.
    """

    # The units of all requests are added up again after so many events.
    recount_every = 512

    def __init__(
        self, rules: Rules, times: StepTimes, pool: BlockPool, arrivals: Arrivals, prefixes: PrefixCache | None = None
    ) -> None:
        self.rules, self.times, self.pool, self.arrivals = rules, times, pool, arrivals
        self.prefixes = prefixes
        self.pace = Pace(rules.tokens_per_step)
        self.now = 0.0
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.decoding = self.context = 0
        self.timeline, self.gaps = Timeline(), TokenGaps()
        self.preemptions = self.finished = 0
        self._finishing: list[tuple[int, int, Request]] = []
        self._visible = 0.0  # the scheduler knows the requests that arrived by then
        self._stalls: list[list[float]] = []  # [requests, seconds] since their last tokens, in steps without decoding

    @abstractmethod
    def plan(self) -> Plan:
        """What the next step does. Takes the blocks of the chunks."""

    @abstractmethod
    def decodes_with_prompts(self) -> bool:
        """Whether decoding requests run in the steps that compute prompts."""

    @property
    def ranks(self) -> Sequence[Replica]:
        """The attention replicas: this one alone."""
        return (self,)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Run until all requests have finished. `progress` is called with the number of finished requests."""
        events = 0
        while True:
            for request in self.arrivals.receive(self._visible):
                self.waiting.append(request)
            chunks, steps = self.plan()
            if chunks:
                self._compute(chunks)
            elif steps:
                self._decode(steps)
            elif not self._wait():
                break
            events += 1
            if events % self.recount_every == 0:
                self.check()
                if progress is not None:
                    progress(self.finished)
        self.check()

    def check(self) -> None:
        """Add up the blocks of all requests. PoolError if the sum is not what the pool counted."""
        if self.pool.capacity is None:
            return
        held = sum([self._held(request) for request in self.running])
        held += self.prefixes.pinned_units if self.prefixes is not None else 0
        if held != self.pool.used:
            raise PoolError(f"requests hold {held} blocks, but {self.pool.used} are taken")

    def _held(self, request: Request) -> int:
        if request.finish_step < 0 or self.rules.reserves == "answer":
            return request.held
        return self._own_units(request, request.key + self.pool.steps + self.rules.lookahead_tokens)

    def _own_units(self, request: Request, tokens: int) -> int:
        """The units of `tokens` tokens of a request, without the blocks that it shares."""
        units = self.pool.units(tokens)
        return units if self.prefixes is None else units - self.prefixes.shared_units(request)

    def _wait(self) -> bool:
        """Nothing runs: go to the next arrival. False if there is none."""
        upcoming = self.arrivals.next_arrival
        if upcoming is None:
            if self.waiting:
                raise PoolError(f"{len(self.waiting)} requests can never start")
            return False
        self.now = self._visible = max(self.now, upcoming)
        return True

    def _compute(self, chunks: list[tuple[Request, Chunk]]) -> None:
        """Run one step with chunks of prompts."""
        began, decoding = self.now, self.decoding if self.decodes_with_prompts() else 0
        seconds = self.times.prompts([chunk for _, chunk in chunks], decoding)
        if decoding:
            line = self.times.line(decoding, self.context)
            seconds += line.base + line.slope * self.context
        self.run_step(chunks, seconds, decoding)
        self._visible = began if self.rules.is_overlapped else self.now

    def run_step(self, chunks: list[tuple[Request, Chunk]], seconds: float, decoding: int) -> None:
        """One step of `seconds` computes chunks of prompts, and the next tokens of `decoding` requests: all or none."""
        began = self.now
        self.now += seconds
        running = len(self.running)
        if decoding:
            self._record_gaps(seconds, seconds, 1)
            self._advance(1)
        elif decoding_now := self.decoding:
            self._stalls = self._stalls or [[decoding_now, 0.0]]
            for stall in self._stalls:
                stall[1] += seconds
        joined = 0
        for request, (_, end) in chunks:
            request.computed = end
            if end == request.target:
                joined += self._first_token(request)
        if self._stalls and joined:
            self._stalls.append([joined, 0.0])
        self.end_event(began, running)

    def _decode(self, steps: int) -> None:
        """Run up to `steps` decode steps, in which no prompt can be computed and no request waits for admission."""
        began, running = self.now, len(self.running)
        steps = min(steps, self.steps_to_finish())
        upcoming = None if self.waiting or running >= self.rules.max_running else self.arrivals.next_arrival
        last = self.now
        while steps:
            decoding, context = self.decoding, self.context
            line = self.times.line(decoding, context)
            part = min(steps, self.pace.steps_within((line.end - context) // decoding) + 1)
            if upcoming is not None:
                # The request arrives in step `there`. With overlap, the step after it is scheduled already.
                there = 0
                if upcoming > self.now:
                    there = steps_until(line, decoding, context, self.now, upcoming, part, self.pace)
                if self.now + run_seconds(line, decoding, context, there, self.pace) >= upcoming:
                    steps = min(steps, max(there + self.rules.is_overlapped, 1))
                    part, upcoming = min(part, steps), None
            seconds = run_seconds(line, decoding, context, part, self.pace)
            last = self.now + run_seconds(line, decoding, context, part - 1, self.pace)
            first, step = line.base + line.slope * context, line.slope * decoding
            self.run_steps(first, first + step * self.pace.tokens(part - 1), part, seconds)
            steps -= part
        self._visible = last if self.rules.is_overlapped else self.now
        self.end_event(began, running)

    def run_steps(self, first: float, last: float, steps: int, seconds: float) -> None:
        """`steps` decode steps take `seconds` together, the first one `first` and the last one `last`."""
        self._record_gaps(first, last, steps)
        self.now += seconds
        self._advance(steps)

    def steps_to_finish(self) -> int:
        """The decode steps until the next request has its answer."""
        while self._finishing[0][2].finish_step != self._finishing[0][0]:
            heappop(self._finishing)  # it was preempted, and ends later
        return self.pace.steps_for(self._finishing[0][0] - self.pool.steps)

    def _possible_steps(self) -> int:
        """The decode steps that may follow without another plan. There are blocks for the first one."""
        return max(1, self.pace.steps_within(self.pool.possible_steps(VERY_MANY)))

    def _advance(self, steps: int) -> None:
        """All decoding requests have got the tokens of `steps` steps."""
        tokens = self.pace.tokens(steps)
        self.pace.advance(steps)
        self.context += tokens * self.decoding
        self.pool.advance(tokens)

    def end_event(self, began: float, running: int) -> None:
        """Take the requests that have their answers out of the batch. The event began with `running` requests."""
        ended: dict[int, Request] = {}
        while self._finishing and self._finishing[0][0] <= self.pool.steps:
            step, number, request = heappop(self._finishing)
            if request.finish_step == step:
                ended[number] = request
        # A step may give several tokens, so answers of several lengths may end with it.
        for number in sorted(ended):
            request = ended[number]
            request.outputs = request.answer_tokens
            self._stop_decoding(request)
            self._finish(request)
        waiting = len(self.waiting) + self.arrivals.waiting(self.now)
        self.timeline.add(Sample(self.now, waiting, len(self.running), self.pool.used), began, running)

    def _first_token(self, request: Request) -> int:
        """A prompt is computed, which gives a token. Returns 1 if the request now decodes, 0 if it has ended."""
        request.outputs += 1
        if request.first_token is None:
            request.first_token = self.now
            request.lag = self._lag(request)
        elif request.last_token is not None:
            self.gaps.add(self.now - request.last_token, 1)
        left = request.answer_tokens - request.outputs
        if not left:
            self._finish(request)
            return 0
        request.key = request.computed - self.pool.steps
        request.finish_step = self.pool.steps + left
        heappush(self._finishing, (request.finish_step, request.number, request))
        self.decoding += 1
        self.context += request.computed + 1
        if self.rules.reserves == "prompt":
            self.pool.enter(request.key + self.rules.lookahead_tokens)
        return 1

    def _stop_decoding(self, request: Request) -> None:
        """Take a request out of the decoding ones. Its blocks stay taken, and `held` says how many."""
        tokens = request.key + self.pool.steps
        self.decoding -= 1
        self.context -= tokens + 1
        if self.rules.reserves == "prompt":
            self.pool.leave(request.key + self.rules.lookahead_tokens)
            request.held = self._own_units(request, tokens + self.rules.lookahead_tokens)
        request.computed, request.finish_step = tokens, -1

    def _finish(self, request: Request) -> None:
        request.finish = self.now
        self._release(request)
        self.finished += 1
        self.arrivals.finished(self.now + request.lag)

    def _lag(self, request: Request) -> float:
        lag = self.rules.lag
        if lag is None:
            return 0.0
        line = self.times.line(max(self.decoding, 1), max(self.context, request.computed))
        # A request that is alone waits for no steps of others.
        steps = lag.steps if self.decoding else max(lag.steps, 0.0)
        steps += lag.prompt_steps * (request.prompt_tokens - request.found_tokens)
        # The prompts of others stop the steps of a request too, but the simulation has these waits already.
        step_seconds = line.base + line.slope * max(self.context, request.computed)
        found = lag.seconds + steps * step_seconds + lag.request_seconds * (len(self.running) - 1)
        if self.decoding and self.decodes_with_prompts():
            found += self.times.alone_seconds(request.prompt_tokens, request.found_tokens)
        return max(found, 0.0)

    def _preempt(self, request: Request) -> None:
        """Stop a running request. It gives its blocks back, and its cache is computed again later."""
        if request.finish_step >= 0:
            request.outputs = request.answer_tokens - (request.finish_step - self.pool.steps)
            self._stop_decoding(request)
            request.last_token = self.now
        self._release(request)
        request.computed = 0
        request.target = request.prompt_tokens + request.outputs
        request.preemptions += 1
        self.preemptions += 1

    def _release(self, request: Request) -> None:
        """A request runs no longer, and gives its units back."""
        del self.running[request]
        self.pool.give(request.held)
        if self.prefixes is not None:
            self.prefixes.release(request, request.held)
        request.held = 0

    def _found_in_use(self, request: Request, promised: int) -> int:
        """Look up what a waiting request finds in the prefix cache. Returns the units of it that others use.

        `promised` units are taken in this step besides those in use.
        """
        return 0 if self.prefixes is None else self.prefixes.look_up(request, promised)

    def _hold(self, request: Request, tokens: int) -> None:
        """A running request takes the units for `tokens` tokens, and if it then decodes, for what it may draft."""
        units = self._own_units(request, tokens + (self.rules.lookahead_tokens if tokens >= request.target else 0))
        self.pool.take(units - request.held)
        request.held = units
        if self.prefixes is not None:
            self.prefixes.add(request, min(tokens, request.prompt_tokens))

    def _start(self, request: Request) -> None:
        """A waiting request runs. The tokens found in the prefix cache need no computing."""
        self.running[request] = None
        if self.prefixes is not None:
            self.prefixes.start(request)
        if request.started is None:
            request.started, request.found_tokens = self.now, request.cached_tokens
        request.computed = request.cached_tokens

    def _record_gaps(self, first: float, last: float, steps: int) -> None:
        """Each decoding request gets a token in each of `steps` steps, whose seconds rise from `first` to `last`."""
        if self._stalls:
            # The first step comes after steps in which these requests stood still. Some may have been retracted.
            left = self.decoding
            for requests, stalled in self._stalls:
                self.gaps.add(first + stalled, min(int(requests), left))
                left -= min(int(requests), left)
            self._stalls.clear()
            steps, first = steps - 1, first + (last - first) / steps
        if steps:
            self.gaps.add_run(first, last, steps, self.decoding)
