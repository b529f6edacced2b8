"""What serves requests in steps: an engine with one scheduler (`Replica`), or DP ranks (`LockStep`).

An event is one step with parts of prompts, or all decode steps until something else happens. Decode steps are planned
first (`begin`) and run later (`end`), so that a request that arrives in the meantime can still end them earlier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kvcalc.engines.scheduler import Schedule
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pace import Pace
from kvcalc.simulation.replicas.timeline import Timeline, TokenGaps
from kvcalc.simulation.replicas.times import Line, Run, decode_run, run_seconds, steps_until


class Server(ABC):
    """Runs the requests of `arrivals`, event by event. `now` is the time up to which everything has happened."""

    # The units of all requests are added up again every this many events.
    recount_every = 512

    now = 0.0
    first_seconds = 0.0  # how much longer the first step with prompts takes
    _planned = 0  # decode steps that may run without another plan, after `begin`
    _is_idle = False  # nothing can run before the next change
    _visible = 0.0  # the scheduler knows the requests that arrived by then
    _unseen = 0  # decode steps since the scheduler looked for new requests
    _foreseen: tuple[float | None, list[Run]] | None = None  # the runs until the planned steps end, and the arrival

    arrivals: Arrivals
    pace: Pace
    schedule: Schedule
    ranks: Sequence[Any]
    """The DP ranks, each a `Replica`: itself alone, or several."""
    finished: int
    """The number of finished requests."""

    @abstractmethod
    def begin(self) -> bool:
        """Run a step with prompts, plan decode steps, or go to the next arrival. False if nothing is left."""

    @abstractmethod
    def end(self) -> None:
        """Run the planned decode steps."""

    @abstractmethod
    def check(self) -> None:
        """Add up the blocks of all requests. PoolError if the sum is not what the pool counted."""

    @abstractmethod
    def _has_work(self) -> bool:
        """Whether requests run or wait."""

    @abstractmethod
    def sent(self, request: Request, end: float) -> None:
        """Keep the blocks of a finished request until `end`, when its cache has been sent."""

    @abstractmethod
    def free_sent(self, until: float) -> None:
        """Give back the blocks of all requests whose cache was sent by `until`."""

    @abstractmethod
    def next_sent(self) -> float | None:
        """When blocks come back because a cache is sent. None if none is."""

    @abstractmethod
    def _upcoming(self) -> float | None:
        """When the next request arrives that ends decode steps early. None if none does."""

    @abstractmethod
    def _lead(self, tokens: int, pace: Pace) -> tuple[Line, int, int, int]:
        """The line of the next decode steps, after each decoding request has got `tokens` more tokens.

        Also its batch, its context, and how many steps take as long as it says.
        """

    def keep_sums(self) -> None:
        """Before the first event: keep no times between tokens and no states over time, which cost time."""
        for rank in self.ranks:
            rank.timeline, rank.gaps = Timeline(samples=False), TokenGaps(counts=False)

    def run(self, progress: Callable[[int], None] | None = None, number: int | None = None) -> None:
        """Run until `number` requests have finished, or all of them. `progress` is called with how many have."""
        events = 0
        while (number is None or self.finished < number) and self.begin():
            if self._planned:
                self.end()
            events += 1
            if events % self.recount_every == 0:
                self.check()
                if progress is not None:
                    progress(self.finished)
        self.check()

    def advance(self) -> None:
        """One event that begins at `next_event`, or the end of the decode steps that are planned."""
        if self._planned:
            self.end()
        else:
            self.begin()

    def next_event(self) -> float:
        """When the server next has to know all requests that arrived before. Infinite if there is nothing to do.

        It is the end of the planned decode steps, as far as the arrivals are known, else the time of the next plan.
        """
        if self._planned:
            now = self.now
            for _, _, _, seconds, _ in self._runs():
                now += seconds
            return now
        if self._has_work() and not self._is_idle:
            return self.now
        return max(self.now, self._next_change())

    def _look(self, until: float, steps: int) -> None:
        """After `steps` decode steps, the scheduler knows the requests that arrived by `until`, if it looks then."""
        if self.schedule.receives_every > 1:
            self._unseen = (self._unseen + steps) % self.schedule.receives_every
        if not self._unseen:
            self._visible = until

    def _steps_to_look(self, done: int, steps: int) -> int:
        """At least `steps` decode steps after `done` others: the scheduler then looks for new requests."""
        every = self.schedule.receives_every
        ran = self._unseen + done
        return -(-(ran + steps) // every) * every - ran

    def _runs(self) -> list[Run]:
        upcoming = self._upcoming()
        if self._foreseen is None or self._foreseen[0] != upcoming:
            self._foreseen = upcoming, self._find_runs(upcoming)
        return self._foreseen[1]

    def _find_runs(self, upcoming: float | None) -> list[Run]:
        """The planned decode steps, in which no prompt can be computed, until a request arrives that could start."""
        now, pace, steps, done, tokens = self.now, self.pace, self._planned, 0, 0
        runs: list[Run] = []
        while steps:
            line, batch, context, most = self._lead(tokens, pace)
            part = min(steps, most)
            if upcoming is not None and now + run_seconds(line, batch, context, part, pace) >= upcoming:
                # With overlap, the step after the one in which the request arrives is scheduled already.
                to_end = steps_until(line, batch, context, now, upcoming, part, pace) if upcoming > now else 0
                steps = min(steps, self._steps_to_look(done, max(to_end + self.schedule.overlaps, 1)))
                part, upcoming = min(part, steps), None
            run = decode_run(line, batch, context, part, pace)
            runs.append(run)
            steps, done = steps - part, done + part
            if steps:
                now += run[3]
                tokens += pace.tokens(part)
                pace = pace.after(part)
        return runs

    def _wait(self) -> bool:
        """Nothing runs until a request arrives, or blocks come back for those that wait. False if neither happens."""
        self._is_idle = True
        return self._next_change() < inf

    def _resume(self) -> None:
        """Go to the time until which nothing ran."""
        self.now = self._visible = max(self.now, self._next_change())
        self._is_idle = False

    def _next_change(self) -> float:
        """The next arrival or, if requests wait, the end of a transfer. It may be earlier if more arrivals are known.

        Infinite if there is none.
        """
        upcoming = self.arrivals.next_arrival
        upcoming = inf if upcoming is None else upcoming
        if not self._has_work():
            return upcoming
        sent = self.next_sent()
        return upcoming if sent is None else min(upcoming, sent)
