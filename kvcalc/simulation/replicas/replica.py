"""One replica of an engine: its clock, its requests, and the steps it runs.

The clock advances all decode steps between two events at once. Events are the arrival of a request that may be
admitted, the end of one, a chunk of a prompt, and a pool without blocks for the next step. The context of the steps
grows by the tokens of a step (`pace`) per request, and their times are summed in closed form.

A subclass has the rules by which one engine schedules: `_schedule`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from heapq import heappop, heappush

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.holder import Holder
from kvcalc.simulation.replicas.pace import Pace
from kvcalc.simulation.replicas.pool import BlockPool, PoolError
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.timeline import Sample, Timeline, TokenGaps
from kvcalc.simulation.replicas.times import Chunk, Line, Run, StepTimes

VERY_MANY = 2**62

Plan = tuple[list[tuple[Request, Chunk]], int]
"""The chunks that the next step computes, and how many steps may follow without another plan.

The steps are 1 if there are chunks, and 0 if nothing can run.
"""


class Replica(Holder):
    """The state of an engine, and its run until no request is left.

    `running` has the running requests in the order in which they started: those that decode, and those whose prompts
    are not computed completely. `context` is the summed tokens of all decoding requests in the next step.
    """

    # Python is 1.7 times as slow with the attributes of an object that has more than 30.
    __slots__ = (
        "_ended", "_finishing", "_hides_launch", "_leaving", "_quiet", "_stalls", "arrivals", "context", "decoding",
        "finished", "gaps", "in_lock_step", "made_room", "pace", "preemptions", "ranks", "timeline", "times", "waiting",
    )  # fmt: skip

    def __init__(
        self, rules: Rules, times: StepTimes, pool: BlockPool, arrivals: Arrivals, prefixes: PrefixCache | None = None
    ) -> None:
        super().__init__(rules, pool, prefixes)
        self.times, self.arrivals = times, arrivals
        self.pace = Pace(rules.tokens_per_step)
        self.ranks = (self,)
        self.waiting: deque[Request] = deque()
        self.decoding = self.context = 0
        self.timeline, self.gaps = Timeline(), TokenGaps()
        self.preemptions = self.finished = 0
        self._finishing: list[tuple[int, int, Request]] = []
        self._quiet = -1, 0  # the changes of the pool, and its steps until which it has blocks, at the last plan
        self._ended: list[Request] = []  # by the prompt alone, in this step
        self._leaving: list[Request] = []  # they have ended, but the scheduler does not know it yet
        self._hides_launch = VERY_MANY  # the fewest tokens of a prompt known to take as long as the host to launch it
        self.in_lock_step = False  # other DP ranks run steps of the same time
        self.made_room = False  # requests left after the coming step was scheduled, so the one after it has more room
        self._stalls: list[list[float]] = []  # [requests, seconds] since their last tokens, in steps without decoding

    def next_plan(self) -> Plan:
        """What the last plan still allows, or another plan if something changed."""
        steps = self.quiet_steps()
        return ([], steps) if steps else self.plan()

    def plan(self) -> Plan:
        """What the next step does. Takes the blocks of the chunks."""
        self.made_room = bool(self._leaving or self._shrinking)
        if not self.made_room:
            return self._schedule()
        # The step is scheduled before the results of the last one are there, and so are the next ones if it is empty.
        chunks, steps = self._schedule()
        decodes = steps and (not chunks or self.decodes_beside())
        self._let_go(self.pool.growth(self.pace.next) if decodes else 0)
        if chunks:
            return chunks, steps
        if steps:
            return [], 1 if self.waiting else self._possible_steps()
        if not self.in_lock_step:
            self.free_sent(self.now)
            self.waiting.extend(self.arrivals.receive(self.now))
        return self._schedule()

    @abstractmethod
    def _schedule(self) -> Plan:
        """What the next step does, by what the scheduler knows."""

    def _let_go(self, promised: int) -> None:
        """Requests give back what they did not need after the last step: places and blocks, if they ended with it.

        The next step takes `promised` units before, besides those of its prompts, which are taken already.
        """
        if self.prefixes is not None:
            self.prefixes.make_room(promised)
        for request in self._leaving:
            self._leave(request)
        self._leaving.clear()
        for request in self._shrinking:
            self.pool.give(request.extra)
            request.extra = 0
        self._shrinking.clear()

    def begin(self) -> bool:
        if self._is_idle:
            self._resume()
        upcoming = self.arrivals.next_arrival
        if upcoming is not None and upcoming <= self._visible:
            self.waiting.extend(self.arrivals.receive(self._visible))
        if self._sent:
            self.free_sent(self._visible)
        chunks, steps = self.plan()
        if chunks:
            self._compute(chunks)
            return True
        self._planned = steps
        return steps > 0 or self._wait()

    def _has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _wait(self) -> bool:
        if self.waiting and self.arrivals.next_arrival is None and not self._sent:
            raise PoolError(f"{len(self.waiting)} requests can never start")
        return super()._wait()

    def _compute(self, chunks: list[tuple[Request, Chunk]]) -> None:
        """Run one step with chunks of prompts."""
        began, decoding = self.now, self.decoding if self.decodes_beside() else 0
        seconds = self.times.prompts([chunk for _, chunk in chunks], decoding)
        if decoding:
            line = self.times.line(decoding, self.context)
            seconds += line.base + line.slope * self.context
        seconds, self.first_seconds = seconds + self.first_seconds, 0.0
        gaps = self.run_step(chunks, seconds, self.pace.advance(1) if decoding else 0)
        if decoding:
            self.gaps.add_run(seconds, seconds, 1, gaps)
        self._unseen = 0
        self._visible = began if self.schedule.overlaps else self.now

    def decodes_beside(self) -> bool:
        """Whether the decoding requests get tokens in the next step if it computes prompts."""
        return self.schedule.mixes

    def run_step(self, chunks: list[tuple[Request, Chunk]], seconds: float, tokens: int) -> int:
        """One step of `seconds` computes chunks of prompts, and the next `tokens` tokens of all decoding requests.

        Returns the requests of which the time since their last token is `seconds` and is not counted yet.
        """
        began = self.now
        self.now += seconds
        running, gaps = len(self.running), 0
        if tokens:
            gaps = self.uncounted_gaps(seconds, seconds, 1)
            self.advance_tokens(1, tokens)
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
        return gaps

    def end(self) -> None:
        began, running, steps = self.now, len(self.running), 0
        last = self.now
        for run in self._runs():
            number, first, slowest, seconds, before = run
            last, steps = self.now + before, steps + number
            self.now += seconds
            self.gaps.add_run(first, slowest, number, self.run_steps(run, self.pace.advance(number)))
        self._planned, self._foreseen = 0, None
        self._look(last if self.schedule.overlaps else self.now, steps)
        self.end_event(began, running)

    def _upcoming(self) -> float | None:
        waits = self.waiting or len(self.running) >= self.rules.max_running
        # If it does not look after every step, it must know by which look a request has arrived.
        return None if waits and self.schedule.receives_every == 1 else self.arrivals.next_arrival

    def _lead(self, tokens: int, pace: Pace) -> tuple[Line, int, int, int]:
        batch = self.decoding
        context = self.context + batch * tokens
        line = self.times.line(batch, context)
        return line, batch, context, pace.steps_within((line.end - context) // batch) + 1

    def run_steps(self, run: Run, tokens: int) -> int:
        """Decode steps in which all decoding requests get `tokens` tokens. Returns what `run_step` returns."""
        steps, first, last, _, _ = run
        gaps = self.uncounted_gaps(first, last, steps) if self._stalls else self.decoding
        self.advance_tokens(steps, tokens)
        return gaps

    def _possible_steps(self) -> int:
        """The decode steps until an answer ends or blocks are missing. There are blocks for the first one."""
        finishing, pool = self._finishing, self.pool
        while finishing[0][2].finish_step != finishing[0][0]:
            heappop(finishing)  # it was preempted, and ends later
        steps, needed = self.pace.until(finishing[0][0] - pool.steps)
        tokens = pool.possible_steps(needed)
        self._quiet = pool.changes, pool.steps + tokens
        return steps if tokens == needed else max(1, self.pace.steps_within(tokens))

    def quiet_steps(self) -> int:
        """The decode steps that the last plan still allows. 0 if another plan is needed, because something changed."""
        changes, last = self._quiet
        if self.waiting or self._leaving or self._shrinking or changes != self.pool.changes:
            return 0
        left = last - self.pool.steps
        return self.pace.steps_within(left) if left > 0 else 0

    def advance_tokens(self, steps: int, tokens: int) -> None:
        """All decoding requests have got the tokens of `steps` steps."""
        self.context += tokens * self.decoding
        self.pool.advance(tokens)

    def end_event(self, began: float, running: int) -> None:
        """Take the requests that have their answers out of the batch. The event began with `running` requests."""
        if self._ended or (self._finishing and self._finishing[0][0] <= self.pool.steps):
            self._end_answers()
        if self.timeline.spend(self.now - began, running):
            waiting = len(self.waiting) + self.arrivals.waiting(self.now)
            left = len(self.running) - len(self._leaving)
            self.timeline.add(Sample(self.now, waiting, left, self.pool.used))

    def _end_answers(self) -> None:
        ended, self._ended = self._ended, []
        while self._finishing and self._finishing[0][0] <= self.pool.steps:
            step, _, request = heappop(self._finishing)
            if request.finish_step == step:
                request.outputs = request.answer_tokens
                self._stop_decoding(request)
                ended.append(request)
        if len(ended) > 1:  # a step may give several tokens, and ends answers of several lengths
            places = {request: place for place, request in enumerate(self.running)}
            ended.sort(key=places.__getitem__)
        for request in ended:
            self._finish(request)

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
            self._ended.append(request)
            return 0
        request.key = request.computed - self.pool.steps
        request.finish_step = self.pool.steps + left
        heappush(self._finishing, (request.finish_step, request.number, request))
        self.decoding += 1
        self.context += request.computed + 1
        if not self.schedule.reserves_answer:
            self.pool.enter(request.key + self.rules.lookahead_tokens)
            if self.pool.prompt_table is not None:
                self._shrink(request)
        return 1

    def _stop_decoding(self, request: Request) -> None:
        """Take a request out of the decoding ones. Its blocks stay taken, and `held` says how many."""
        tokens = request.key + self.pool.steps
        self.decoding -= 1
        self.context -= tokens + 1
        if not self.schedule.reserves_answer:
            units = self.pool.leave(request.key + self.rules.lookahead_tokens)
            request.held = units - request.shared * self._shared_units + request.extra
            request.extra = 0
        request.computed, request.finish_step = tokens, -1

    def _finish(self, request: Request) -> None:
        request.finish = self.now
        if self.schedule.overlaps:
            self._leaving.append(request)
        else:
            self._leave(request)
        self.finished += 1
        self.arrivals.finished(request)

    def _lag(self, request: Request) -> float:
        lag = self.rules.lag
        if lag is None:
            return 0.0
        context = max(self.context, request.computed)
        line = self.times.line(max(self.decoding, 1), context)
        seconds = (
            lag.seconds + lag.token_seconds * request.prompt_tokens + lag.steps * (line.base + line.slope * context)
        )
        cached_tokens, tokens = request.cached_tokens, request.prompt_tokens - request.cached_tokens
        if lag.launch_seconds and tokens < self._hides_launch:
            wait = lag.launch_seconds - self.times.prompts([(cached_tokens, request.prompt_tokens)], 0)
            seconds += max(0.0, wait)
            if wait <= 0 and not cached_tokens:
                self._hides_launch = tokens
        return seconds

    def _preempt(self, request: Request) -> None:
        """Stop a running request. It gives its blocks back, and its cache is computed again later."""
        named_tokens = None
        if request.finish_step >= 0:
            request.outputs = request.answer_tokens - (request.finish_step - self.pool.steps)
            self._stop_decoding(request)
            request.last_token = self.now
            if self.schedule.overlaps:
                # Blocks get names when the tokens are known: those of the prompt at the start, others a step later.
                named_tokens = max(request.target, request.computed - self.pace.last)
        self._release(request, named_tokens)
        request.target = request.prompt_tokens + request.outputs
        if self.rules.keeps != "found":
            request.cached_tokens = request.target - 1 if self.rules.keeps == "all" else 0
        request.preemptions += 1
        self.preemptions += 1

    def _start(self, request: Request) -> None:
        """A waiting request runs. The tokens found in the prefix cache need no computing."""
        self.running[request] = None
        if self.prefixes is not None:
            self.prefixes.start(request)
        if request.started is None:
            request.started, request.found_tokens = self.now, request.cached_tokens
        request.computed = request.cached_tokens

    def uncounted_gaps(self, first: float, last: float, steps: int) -> int:
        """Each decoding request gets a token in each of `steps` steps, whose seconds rise from `first` to `last`.

        Returns the number of these requests if all of these times are still to be counted in `gaps`. It is 0 if the
        requests stood still before, because then the first times are longer and all are counted here.
        """
        if not self._stalls:
            return self.decoding
        # Some may have been retracted.
        left = self.decoding
        for requests, stalled in self._stalls:
            self.gaps.add(first + stalled, min(int(requests), left))
            left -= min(int(requests), left)
        self._stalls.clear()
        if steps > 1:
            self.gaps.add_run(first + (last - first) / steps, last, steps - 1, self.decoding)
        return 0
