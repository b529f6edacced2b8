"""DP ranks in lock step: each has its own scheduler and cache, and their steps begin and end together.

The experts of a layer are divided among all replicas, so in every layer each replica waits for the others, and a step
takes as long as that of the slowest one. A replica without requests computes a step of padding, which takes no longer
(run_busy_loop of DPEngineCoreProc in v1/engine/core.py of vLLM 0.33.0; prepare_mlp_sync_batch of SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.balance import Balancer, plan_without_prompts
from kvcalc.simulation.replicas.pace import Pace
from kvcalc.simulation.replicas.replica import VERY_MANY, Plan, Replica
from kvcalc.simulation.replicas.routing import Router
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.replicas.times import Line, RankTimes


class OfRank(Arrivals):
    """What one DP rank sees of the group's arrivals: only that clients get their answers.

    The first replica also counts the requests that no replica has yet.
    """

    def __init__(self, group: Arrivals) -> None:
        super().__init__(())
        self._group = group
        self.router: Router | None = None

    def waiting(self, now: float) -> int:
        return 0 if self.router is None else self._group.waiting(now) + len(self.router.queue)

    def finished(self, request: Request) -> None:
        self._group.finished(request)


class LockStep(Server):
    """DP ranks (`ranks`) that serve the requests of `arrivals`."""

    def __init__(self, router: Router, times: RankTimes, arrivals: Arrivals) -> None:
        self.router, self.times, self.arrivals = router, times, arrivals
        self.ranks: Sequence[Replica] = router.ranks
        self.pace, self.schedule = self.ranks[0].pace, self.ranks[0].schedule  # one for all of them
        self._sends = self.ranks[0].rules.sends
        self._active: list[Replica] = []  # the ranks that decode in the planned steps
        self._batch = 0  # their requests
        balance = self.schedule.balance
        self._balancer = None if balance is None else Balancer(balance, self.ranks)
        for rank in self.ranks:
            rank.pace, rank.in_lock_step = self.pace, True
        first = self.ranks[0].arrivals
        if isinstance(first, OfRank):
            first.router = router

    @property
    def finished(self) -> int:  # type: ignore[override]
        return sum(rank.finished for rank in self.ranks)

    def begin(self) -> bool:
        if self._is_idle:
            self._resume()
        upcoming, queue = self.arrivals.next_arrival, self.router.queue
        if upcoming is not None and upcoming <= self._visible:
            queue.extend(self.arrivals.receive(self._visible))
        if self._sends:
            self.free_sent(self._visible)
        if queue:
            self.router.route()
        held_steps = 0 if self._balancer is None else self._balancer.held_steps()
        plans = [plan_without_prompts(rank) if held_steps else rank.next_plan() for rank in self.ranks]
        if any(chunks for chunks, _ in plans):
            self._step(plans)
            return True
        self._planned = min([steps for _, steps in plans if steps], default=0)
        if held_steps and any(rank.waiting for rank in self.ranks):
            self._planned = min(self._planned, held_steps)
        if self._planned and queue and any(rank.made_room for rank in self.ranks):
            self._planned = 1
        self._active = [rank for rank in self.ranks if rank.decoding]
        self._batch = sum([rank.decoding for rank in self._active])
        return self._planned > 0 or self._wait()

    def _wait(self) -> bool:
        if self.router.queue and any(rank.made_room for rank in self.ranks):
            self._visible = self.now  # requests that ended have just made room for these
            return True
        return super()._wait()

    def _resume(self) -> None:
        super()._resume()
        for rank in self.ranks:
            rank.now = self.now

    def sent(self, request: Request, end: float) -> None:
        next(rank for rank in self.ranks if rank.has(request)).sent(request, end)

    def free_sent(self, until: float) -> None:
        for rank in self.ranks:
            rank.free_sent(until)

    def next_sent(self) -> float | None:
        return min([end for rank in self.ranks if (end := rank.next_sent()) is not None], default=None)

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def _has_work(self) -> bool:
        return bool(self.router.queue) or any(rank.waiting or rank.running for rank in self.ranks)

    def _step(self, plans: Sequence[Plan]) -> None:
        """One step, in which some replica computes a part of a prompt."""
        began = self.now
        decoding = [
            rank.decoding if not chunks or rank.decodes_beside() else 0 for rank, (chunks, _) in zip(self.ranks, plans)
        ]
        seconds = self._slowest(plans, decoding) + self.first_seconds
        self.first_seconds = 0.0
        tokens, gaps = self.pace.advance(1) if any(decoding) else 0, 0
        for rank, (chunks, _), batch in zip(self.ranks, plans, decoding):
            running = len(rank.running)
            if chunks:
                gaps += rank.run_step(chunks, seconds, tokens if batch else 0)
                continue
            rank.now += seconds
            if batch:
                gaps += rank.run_steps((1, seconds, seconds, seconds, 0.0), tokens)
                rank.end_event(began, running)
        if tokens:
            self.ranks[0].gaps.add_run(seconds, seconds, 1, gaps)
        self.now = began + seconds
        if self._balancer is not None:
            self._balancer.ran(1)
        self._unseen = 0
        self._visible = began if self.schedule.overlaps else self.now

    def _slowest(self, plans: Sequence[Plan], decoding: Sequence[int]) -> float:
        """The seconds of a step of the slowest replica."""
        total, slowest = sum(decoding), 0.0
        tokens, others_alone = sum([end - start for chunks, _ in plans for _, (start, end) in chunks]), None
        for rank, (chunks, _), batch in zip(self.ranks, plans, decoding):
            if chunks:
                seconds = self.times.rank_prompts([chunk for _, chunk in chunks], tokens, batch, total)
            elif batch:
                if others_alone is None:
                    others_alone = self.times.rank_prompts([], tokens, batch, total)
                seconds = others_alone
            else:
                continue
            if total:
                context = rank.context if batch else 1
                line = self.times.rank_line(batch or 1, context, total)
                seconds += line.base + line.slope * context
            slowest = max(slowest, seconds)
        return slowest

    def end(self) -> None:
        began = last = self.now
        steps, active, gaps = 0, self._active, self.ranks[0].gaps
        running = [len(rank.running) for rank in active]
        for run in self._runs():
            number, first, slowest, seconds, before = run
            last, steps = self.now + before, steps + number
            self.now += seconds
            tokens = self.pace.advance(number)
            gaps.add_run(first, slowest, number, sum([rank.run_steps(run, tokens) for rank in active]))
        self._planned, self._foreseen = 0, None
        if self._balancer is not None:
            self._balancer.ran(steps)
        self._look(last if self.schedule.overlaps else self.now, steps)
        for rank in self.ranks:
            rank.now = self.now
        for rank, number in zip(active, running):
            rank.end_event(began, number)

    def _upcoming(self) -> float | None:
        looks_rarely = self.schedule.receives_every > 1
        return self.arrivals.next_arrival if looks_rarely or self.router.needs_arrivals() else None

    def _lead(self, tokens: int, pace: Pace) -> tuple[Line, int, int, int]:
        """The line of the slowest replica, its batch and context, and for how many steps it stays the slowest."""
        total, rank_line = self._batch, self.times.rank_line
        lines: list[tuple[float, float, int, int, Line]] = []
        for rank in self._active:
            batch = rank.decoding
            context = rank.context + batch * tokens
            line = rank_line(batch, context, total)
            base, slope, _ = line
            lines.append((base + slope * context, slope * batch, batch, context, line))
        seconds, growth, batch, context, line = max(lines, key=itemgetter(0, 1))
        most = VERY_MANY
        for other, faster, own_batch, own_context, (_, _, end) in lines:
            left = (end - own_context) // own_batch
            if faster > growth:
                left = min(left, int((seconds - other) / (faster - growth)))
            if left < most:
                most = left
        return line, batch, context, pace.steps_within(most) + 1
