"""Schedulers that compute prompts in the same steps as the next tokens of running requests (`Schedule.mixes`).

Running requests come first, and then prompts in the order of their arrival. If a request starts without room for its
answer (`Schedule.reserves_answer` is false) and then finds none, the last running request is preempted: it goes to the
head of the queue and its cache is computed again. The rules and their sources are in `kvcalc.engines`.
"""

from __future__ import annotations

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Plan, Replica
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, StepTimes


class MixedReplica(Replica):
    """Running requests first, then prompts in the same step."""

    def _schedule(self) -> Plan:
        growth, partial, has_preempted = self.pool.growth(self.pace.next), self._partial(), False
        if (partial is not None or growth > self.pool.free) and not self.schedule.reserves_answer:
            has_preempted = self._make_room()
            if has_preempted:
                growth, partial = self.pool.growth(self.pace.next), self._partial()
        if partial is None and not self.waiting:
            if not self.decoding:
                return [], 0
            return [], 1 if has_preempted or self.made_room else self._possible_steps()
        chunks = []
        budget = self._prompt_budget()
        if partial is not None and budget > 0:
            chunks.append(self._chunk(partial, budget))
            budget -= chunks[0][1][1] - chunks[0][1][0]
        reserves_answer = self.schedule.reserves_answer
        while not has_preempted and budget > 0 and self.waiting and len(self.running) < self.rules.max_running:
            request = self.waiting[0]
            needed = request.total_tokens if reserves_answer else request.target
            needed = self.pool.prompt_units(needed + self.rules.lookahead_tokens)
            needed -= self._found_in_use(request, growth)
            tokens = request.target - request.cached_tokens
            if not self.schedule.divides and budget < tokens <= self.rules.step_tokens:
                break
            if needed > self.pool.free - growth:
                break
            self.waiting.popleft()
            self._start(request)
            if reserves_answer:
                self._hold(request, request.total_tokens)
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1][1][1] - chunks[-1][1][0]
        if chunks or not self.decoding:
            return chunks, len(chunks[:1])
        return [], 1 if has_preempted or self.made_room else self._possible_steps()

    def _prompt_budget(self) -> int:
        """The tokens of a step that are left for prompts."""
        return self.rules.step_tokens - self.decoding * self.rules.checked_tokens

    def _partial(self) -> Request | None:
        """The running request whose prompt is not computed completely. It started last, so there is only one."""
        if len(self.running) == self.decoding + len(self._leaving):
            return None
        return next(reversed(self.running))

    def _make_room(self) -> bool:
        """Preempt the last running requests until the others have blocks for the next step. Whether it preempted."""
        has_preempted = False
        while self.running and not self.schedule.reserves_answer:
            needed, partial = self.pool.growth(self.pace.next), self._partial()
            if partial is not None:
                end = min(partial.target, partial.computed + self._prompt_budget())
                end += self.rules.lookahead_tokens if end == partial.target else 0
                needed += max(self._prompt_units(partial, end) - partial.held, 0)
            if needed <= self.pool.free:
                break
            last = next(reversed(self.running))
            self._preempt(last)
            if last.finish is None:
                self.waiting.appendleft(last)
            else:
                self._leaving.remove(last)
            has_preempted = True
        return has_preempted

    def _chunk(self, request: Request, budget: int) -> tuple[Request, Chunk]:
        """The next part of a prompt, whose blocks are taken."""
        end = min(request.target, request.computed + budget)
        if not self.schedule.reserves_answer:
            self._hold(request, end)
        return request, (request.computed, end)


class SlotsReplica(MixedReplica):
    """Slots with memory of their own, and batches with the tokens of all of them (`Schedule.has_slots`).

    Requests without a slot wait in the order of their arrival. A batch computes parts of prompts in the order of the
    slots, so several prompts may be computed in part.
    """

    def __init__(
        self, rules: Rules, times: StepTimes, pool: BlockPool, arrivals: Arrivals, prefixes: PrefixCache | None = None
    ) -> None:
        super().__init__(rules, times, pool, arrivals, prefixes)
        # The free slots, the next one to be used at the end: it was used longest ago, or is the last of the unused.
        self._free = list(range(rules.max_running))
        self._slot_of: dict[Request, int] = {}
        self._prompts: dict[int, Request] = {}  # slot -> the request whose prompt is not computed completely

    def _schedule(self) -> Plan:
        while self.waiting and self._free:
            request = self.waiting.popleft()
            slot = self._slot_of[request] = self._free.pop()
            self._prompts[slot] = request
            self._start(request)
        chunks = []
        budget = self._prompt_budget()
        for slot in sorted(self._prompts):
            if budget <= 0:
                break
            request = self._prompts[slot]
            end = self.schedule.end_of_part(request.computed, request.target, budget)
            budget -= end - request.computed
            chunks.append((request, (request.computed, end)))
            if end == request.target:
                del self._prompts[slot]
        if chunks or not self.decoding:
            return chunks, len(chunks[:1])
        return [], self._possible_steps()

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self._free.insert(0, self._slot_of.pop(request))
