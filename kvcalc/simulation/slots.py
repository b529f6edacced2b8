"""Slots with memory of their own, and batches with the tokens of all of them (`Schedule.has_slots`).

Requests without a slot wait in the order of their arrival. A batch computes parts of prompts in the order of the slots,
so several prompts may be computed in part. The rules and their source are in `kvcalc.engines.llama_cpp.scheduler`.
"""

from __future__ import annotations

from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.mixed import MixedReplica
from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.replica import VERY_MANY, Plan
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Rules
from kvcalc.simulation.times import StepTimes


class SlotsReplica(MixedReplica):
    """Slots that compute prompts and answers in the same batches."""

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
        return [], VERY_MANY

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self._free.insert(0, self._slot_of.pop(request))
