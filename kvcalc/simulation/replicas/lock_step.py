"""DP ranks in lock step: each has its own scheduler and cache, and their steps begin and end together.

The experts of a layer are divided among all replicas, so in every layer each replica waits for the others, and a step
takes as long as that of the slowest one. A replica without requests computes a step of padding, which takes no longer
(run_busy_loop of DPEngineCoreProc in v1/engine/core.py of vLLM 0.33.0; prepare_mlp_sync_batch of SGLang 0.5.23).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pace import Pace
from kvcalc.simulation.replicas.replica import VERY_MANY, Plan, Replica
from kvcalc.simulation.replicas.routing import Router
from kvcalc.simulation.replicas.server import Run, Server
from kvcalc.simulation.replicas.times import Chunk, Line, RankTimes, decode_run, run_seconds, steps_until


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
        self.pace = self.ranks[0].pace  # one for all of them
        for rank in self.ranks:
            rank.pace, rank.in_lock_step = self.pace, True
        self._is_overlapped = self.ranks[0].schedule.overlaps
        first = self.ranks[0].arrivals
        if isinstance(first, OfRank):
            first.router = router

    @property
    def finished(self) -> int:  # type: ignore[override]
        return sum(rank.finished for rank in self.ranks)

    def begin(self) -> bool:
        if self._is_idle:
            self._resume()
        self.router.queue.extend(self.arrivals.receive(self._visible))
        self.free_sent(self._visible)
        self.router.route()
        plans: list[Plan] = [([], steps) if (steps := rank.quiet_steps()) else rank.plan() for rank in self.ranks]
        if any(chunks for chunks, _ in plans):
            self._step(plans)
            return True
        self._planned = min([steps for _, steps in plans if steps], default=0)
        if self._planned and self.router.queue and any(rank.made_room for rank in self.ranks):
            self._planned = 1
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
        seconds = self._slowest([[chunk for _, chunk in chunks] for chunks, _ in plans], decoding)
        seconds, self.first_seconds = seconds + self.first_seconds, 0.0
        tokens, gaps = self.pace.tokens(1) if any(decoding) else 0, 0
        for rank, (chunks, _), number in zip(self.ranks, plans, decoding):
            if chunks or number:
                gaps += rank.run_step(chunks, seconds, tokens if number else 0)
            else:
                rank.now += seconds
        self._count(Run(1, seconds, seconds, seconds, 0.0) if tokens else None, gaps)
        self.now = began + seconds
        self._unseen = 0
        self._visible = began if self._is_overlapped else self.now

    def _count(self, run: Run | None, gaps: int) -> None:
        """`gaps` decoding requests of all replicas get their tokens in these steps. None if none decodes."""
        if run is not None:
            self.ranks[0].gaps.add_run(run.first, run.last, run.steps, gaps)
            self.pace.advance(run.steps)

    def _slowest(self, chunks: Sequence[Sequence[Chunk]], decoding: Sequence[int]) -> float:
        """The seconds of a step of the slowest replica."""
        total, slowest = sum(decoding), 0.0
        of_all = [chunk for found in chunks for chunk in found]
        others_alone: float | None = None
        for rank, own, number in zip(self.ranks, chunks, decoding):
            if own:
                others = [chunk for found in chunks if found is not own for chunk in found]
                seconds = self.times.rank_prompts(own, others, number, total)
            elif number:
                if others_alone is None:
                    others_alone = self.times.rank_prompts([], of_all, number, total)
                seconds = others_alone
            else:
                continue
            if total:
                batch, context = max(number, 1), rank.context if number else 1
                line = self.times.rank_line(batch, context, total)
                seconds += line.base + line.slope * context
            slowest = max(slowest, seconds)
        return slowest

    def end(self) -> None:
        began, steps = self.now, 0
        last = began
        active = [rank for rank in self.ranks if rank.decoding]
        running = [len(rank.running) for rank in active]
        for run in self._runs():
            last, steps = self.now + run.all_but_last, steps + run.steps
            self.now += run.all
            tokens = self.pace.tokens(run.steps)
            self._count(run, sum([rank.run_steps(run, tokens) for rank in active]))
        self._planned, self._foreseen = 0, None
        self._look(last if self._is_overlapped else self.now, steps)
        if len(active) < len(self.ranks):
            for rank in self.ranks:
                rank.now = self.now
        for rank, number in zip(active, running):
            rank.end_event(began, number)

    def _upcoming(self) -> float | None:
        looks_rarely = self.ranks[0].schedule.receives_every > 1
        return self.arrivals.next_arrival if looks_rarely or self.router.needs_arrivals() else None

    def _find_runs(self, upcoming: float | None) -> list[Run]:
        """No prompt can be computed in these steps, and no request waits for admission."""
        active = [rank for rank in self.ranks if rank.decoding]
        steps = min(self._planned, *(rank.steps_to_finish() for rank in active))
        batches, contexts = [rank.decoding for rank in active], [rank.context for rank in active]
        now, pace, total, runs, done = self.now, self.pace, sum(batches), list[Run](), 0
        while steps:
            line, place, most = self._lead(batches, contexts, total, pace)
            batch, context, part = batches[place], contexts[place], min(steps, most)
            if upcoming is not None:
                steps_to_end = 0
                if upcoming > now:
                    steps_to_end = steps_until(line, batch, context, now, upcoming, part, pace)
                if now + run_seconds(line, batch, context, steps_to_end, pace) >= upcoming:
                    steps = min(steps, self._steps_to_look(done, max(steps_to_end + self._is_overlapped, 1)))
                    part, upcoming = min(part, steps), None
            runs.append(decode_run(line, batch, context, part, pace))
            steps, done = steps - part, done + part
            if steps:
                now += runs[-1].all
                tokens = pace.tokens(part)
                contexts = [context + tokens * batch for context, batch in zip(contexts, batches)]
                pace = pace.after(part)
        return runs

    def _lead(self, batches: Sequence[int], contexts: Sequence[int], total: int, pace: Pace) -> tuple[Line, int, int]:
        """The line of the slowest replica, its place, and for how many steps it is the slowest on this line."""
        lines = [self.times.rank_line(batch, context, total) for batch, context in zip(batches, contexts)]
        costs = [
            (line.base + line.slope * context, line.slope * batch)
            for line, batch, context in zip(lines, batches, contexts)
        ]
        place = max(range(len(lines)), key=costs.__getitem__)
        (seconds, growth), tokens = costs[place], VERY_MANY
        for line, batch, context, (other, faster) in zip(lines, batches, contexts, costs):
            tokens = min(tokens, (line.end - context) // batch)
            if faster > growth:
                tokens = min(tokens, int((seconds - other) / (faster - growth)))
        return lines[place], place, pace.steps_within(tokens) + 1
