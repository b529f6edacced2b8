"""llama.cpp's scheduler: slots, and batches with the tokens of all of them.

Source: tools/server/server-context.cpp of llama.cpp, 2026: get_available_slot, and pre_decode of update_slots.

- A request gets a slot as soon as one is free: the one that was used longest ago, and of several the last one. Requests
  without a slot wait in the order of their arrival.
- A batch has the next tokens of all slots that answer, and then parts of prompts up to n_batch tokens, in the order of
  the slots and not of the arrivals (cont_batching, which is on by default). So several prompts may be computed in part.
- If the model has windows or recurrent states, a part of a prompt ends n_ubatch + 4 and 4 tokens before the end of the
  prompt, where the server saves the state (n_ctx_checkpoints; from pull request 20288 on).
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
            end = self._end_of_chunk(request, budget)
            budget -= end - request.computed
            chunks.append((request, (request.computed, end)))
            if end == request.target:
                del self._prompts[slot]
        if chunks or not self.decoding:
            return chunks, len(chunks[:1])
        return [], VERY_MANY

    def _end_of_chunk(self, request: Request, budget: int) -> int:
        end = min(request.target, request.computed + budget)
        stops = [request.target - min(tokens, self.rules.step_tokens) for tokens in self.rules.ends_chunks]
        return min((stop for stop in stops if request.computed < stop <= end), default=end)

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self._free.insert(0, self._slot_of.pop(request))
