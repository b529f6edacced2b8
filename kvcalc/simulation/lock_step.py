"""Attention replicas in lock step: each has its own scheduler and cache, and their steps begin and end together.

The experts of a layer are divided among all replicas, so in every layer each replica waits for the others, and a step
takes as long as that of the slowest one. A replica without requests computes a step of padding, which takes no longer
(run_busy_loop of DPEngineCoreProc in v1/engine/core.py of vLLM 0.33.0; prepare_mlp_sync_batch of SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.replica import Plan, Replica
from kvcalc.simulation.requests import Request
from kvcalc.simulation.routing import Router
from kvcalc.simulation.times import Chunk, Line, RankTimes, run_seconds, steps_until


class OfRank(Arrivals):
    """What one attention replica sees of the group's arrivals: only that clients get their answers.

    The first replica also counts the requests that no replica has yet.
    """

    def __init__(self, group: Arrivals) -> None:
        super().__init__(())
        self._group = group
        self.router: Router | None = None

    def receive(self, until: float) -> Iterator[Request]:
        return iter(())

    def waiting(self, now: float) -> int:
        return 0 if self.router is None else self._group.waiting(now) + len(self.router.queue)

    def finished(self, now: float) -> None:
        self._group.finished(now)


class LockStep:
    """Attention replicas (`ranks`) that serve the requests of `arrivals`."""

    def __init__(self, router: Router, times: RankTimes, arrivals: Arrivals) -> None:
        self.router, self.times, self.arrivals = router, times, arrivals
        self.ranks: Sequence[Replica] = router.ranks
        self.now = self._visible = 0.0
        self._is_overlapped = self.ranks[0].rules.is_overlapped
        first = self.ranks[0].arrivals
        if isinstance(first, OfRank):
            first.router = router

    @property
    def finished(self) -> int:
        """The number of finished requests."""
        return sum(rank.finished for rank in self.ranks)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Run until all requests have finished. `progress` is called with the number of finished requests."""
        events = 0
        while True:
            self.router.queue.extend(self.arrivals.receive(self._visible))
            self.router.route()
            plans = [rank.plan() for rank in self.ranks]
            if any(chunks for chunks, _ in plans):
                self._step(plans)
            elif any(steps for _, steps in plans):
                made_room = self.router.queue and any(rank.made_room for rank in self.ranks)
                self._decode(1 if made_room else min(steps for _, steps in plans if steps))
            elif not self._wait():
                break
            for rank in self.ranks:
                rank.now = self.now
            events += 1
            if events % Replica.recount_every == 0:
                self._check()
                if progress is not None:
                    progress(self.finished)
        self._check()

    def _check(self) -> None:
        for rank in self.ranks:
            rank.check()

    def _wait(self) -> bool:
        upcoming = self.arrivals.next_arrival
        if self.router.queue:
            upcoming = self.now  # places became free when the last step was known to have ended requests
        if upcoming is None:
            return False
        self.now = self._visible = max(self.now, upcoming)
        return True

    def _step(self, plans: Sequence[Plan]) -> None:
        """One step, in which some replica computes a part of a prompt."""
        began = self.now
        decoding = [
            rank.decoding if not chunks or rank.decodes_with_prompts() else 0
            for rank, (chunks, _) in zip(self.ranks, plans)
        ]
        seconds = self._slowest([[chunk for _, chunk in chunks] for chunks, _ in plans], decoding)
        for rank, (chunks, _), number in zip(self.ranks, plans, decoding):
            if chunks or number:
                rank.run_step(chunks, seconds, number)
            if not number and any(decoding):
                rank.pace.advance(1)
        self.now = began + seconds
        self._visible = began if self._is_overlapped else self.now

    def _slowest(self, chunks: Sequence[Sequence[Chunk]], decoding: Sequence[int]) -> float:
        """The seconds of a step of the slowest replica."""
        total, slowest = sum(decoding), 0.0
        for place, rank in enumerate(self.ranks):
            if not chunks[place] and not decoding[place]:
                continue
            others = [chunk for other, found in enumerate(chunks) if other != place for chunk in found]
            seconds = self.times.rank_prompts(chunks[place], others, total)
            if total:
                batch, context = max(decoding[place], 1), rank.context if decoding[place] else 1
                line = self.times.rank_line(batch, context, total)
                seconds += line.base + line.slope * context
            slowest = max(slowest, seconds)
        return slowest

    def _decode(self, steps: int) -> None:
        """Run up to `steps` decode steps, in which no prompt can be computed and no request waits for admission."""
        began = last = self.now
        active = [rank for rank in self.ranks if rank.decoding]
        running = [len(rank.running) for rank in active]
        steps = min(steps, *(rank.steps_to_finish() for rank in active))
        pace, total = active[0].pace, sum(rank.decoding for rank in active)
        upcoming = self.arrivals.next_arrival if self.router.needs_arrivals() else None
        while steps:
            lines = [self.times.rank_line(rank.decoding, rank.context, total) for rank in active]
            line, slowest, part = self._lead(active, lines)
            batch, context, part = slowest.decoding, slowest.context, min(steps, part)
            if upcoming is not None:
                there = 0
                if upcoming > self.now:
                    there = steps_until(line, batch, context, self.now, upcoming, part, pace)
                if self.now + run_seconds(line, batch, context, there, pace) >= upcoming:
                    steps = min(steps, max(there + self._is_overlapped, 1))
                    part, upcoming = min(part, steps), None
            seconds = run_seconds(line, batch, context, part, pace)
            last = self.now + run_seconds(line, batch, context, part - 1, pace)
            first = line.base + line.slope * context
            end = first + line.slope * batch * pace.tokens(part - 1)
            for rank in self.ranks:
                if rank.decoding:
                    rank.run_steps(first, end, part, seconds)
                else:
                    rank.pace.advance(part)
            self.now += seconds
            steps -= part
        self._visible = last if self._is_overlapped else self.now
        for rank, number in zip(active, running):
            rank.end_event(began, number)

    def _lead(self, active: Sequence[Replica], lines: Sequence[Line]) -> tuple[Line, Replica, int]:
        """The line of the slowest replica, that replica, and for how many steps it is the slowest on this line."""
        pace = active[0].pace
        costs = [(line.base + line.slope * r.context, line.slope * r.decoding) for line, r in zip(lines, active)]
        place = max(range(len(active)), key=costs.__getitem__)
        (seconds, growth), tokens = costs[place], 2**62
        for line, rank, (other, faster) in zip(lines, active, costs):
            tokens = min(tokens, (line.end - rank.context) // rank.decoding)
            if faster > growth:
                tokens = min(tokens, int((seconds - other) / (faster - growth)))
        return lines[place], active[place], pace.steps_within(tokens) + 1
