"""SGLang's scheduler: prompts first, in steps of their own.

Source: SGLang 0.5.23, get_next_batch_to_run, _get_new_batch_prefill_raw, update_running_batch and on_idle
(srt/managers/scheduler.py), PrefillAdder (schedule_policy.py), retract_decode (schedule_batch.py) and
NewTokenRatioTracker (scheduler_components/new_token_ratio_tracker.py). The policy is the default, fcfs, and
enable_mixed_chunk is off by default.

- If requests wait, a step computes prompts, up to chunked_prefill_size tokens, while decoding requests stand still. A
  prompt that is too long for the step is continued in the next one.
- A request starts if its prompt, its answer and a page are fewer tokens than are free, without the part of the answers
  of decoding requests that they are expected to take: new_token_ratio, which is 0.7 at first and falls to 0.098 in 600
  decode steps. It is 0.7 again when nothing is left to run. If a request may not start, no other is tried until one
  has finished. The answers of requests with ignore_eos count in full since 0.5.23 (and not yet in 0.5.20), but
  simulated requests end as those of users do.
- If the next decode step finds no room, the requests with the shortest answers so far are retracted. They wait at the
  end of the queue, and the ratio rises to what the others were seen to take.
"""

from __future__ import annotations

from kvcalc.simulation.arrivals import Arrivals
from kvcalc.simulation.pool import BlockPool
from kvcalc.simulation.prefix_cache import PrefixCache
from kvcalc.simulation.replica import Plan, Replica
from kvcalc.simulation.requests import Request
from kvcalc.simulation.rules import Rules
from kvcalc.simulation.times import Chunk, StepTimes

# SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS,
# SGLANG_RETRACT_DECODE_STEPS and SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION (srt/environ.py).
_FIRST_RATIO = 0.7
_LEAST_RATIO = _FIRST_RATIO * 0.14
_DECAY = (_FIRST_RATIO - _LEAST_RATIO) / 600
_RETRACT_STEPS = 20
_MOST_NEW_TOKENS = 4096


class PrefillFirstReplica(Replica):
    """Steps with prompts alone, then steps that decode. A unit of the pool is a token, and a block is a page."""

    def __init__(
        self, rules: Rules, times: StepTimes, pool: BlockPool, arrivals: Arrivals, prefixes: PrefixCache | None = None
    ) -> None:
        super().__init__(rules, times, pool, arrivals, prefixes)
        self.ratio = _FIRST_RATIO
        self._is_full = False
        self._chunked: Request | None = None

    def decodes_with_prompts(self) -> bool:
        return False

    def plan(self) -> Plan:
        if not self.decoding:
            self._is_full = False
        if self._chunked is not None or (self.waiting and not self._is_full):
            chunks = self._prompts()
            if chunks:
                return chunks, 1
        if not self.decoding:
            self.ratio = _FIRST_RATIO
            return [], 0
        has_retracted = self._make_room()
        return [], 1 if has_retracted else self._possible_steps()

    def _prompts(self) -> list[tuple[Request, Chunk]]:
        """The chunks of a step with prompts. Their tokens are taken."""
        page, left = self.pool.block_tokens, self.rules.step_tokens
        more = page + self.rules.lookahead_tokens
        free = self.pool.free - self._expected()
        chunks = []
        if self._chunked is not None:
            request, self._chunked = self._chunked, None
            limit = min(left, int(free)) if int(free) > 0 else left
            taken = min(limit, request.target - request.computed)
            chunks.append(self._chunk(request, taken))
            left, free = left - _pages(taken, page), free - _pages(taken, page) - more
            free -= 0 if self._chunked else min(request.answer_tokens, _MOST_NEW_TOKENS)
        while self.waiting and left > 0 and free > 0:
            request = self.waiting[0]
            if self._chunked is not None or len(self.running) >= self.rules.max_running:
                self._is_full = self._chunked is None
                break
            needed = request.target - self._found_in_use(request, 0)
            missed = request.target - request.cached_tokens
            most_new = min(request.answer_tokens - request.outputs, _MOST_NEW_TOKENS)
            # The tokens that are found in the prefix cache take memory too, if no other request uses them.
            if needed + most_new + more >= free:
                self._is_full = bool(self.running)
                break
            taken = missed if _pages(missed, page) <= left else left // page * page
            if not taken:
                break
            self.waiting.popleft()
            before = self.pool.free
            self._start(request)
            chunks.append(self._chunk(request, taken))
            left, free = left - _pages(taken, page), free - (before - self.pool.free) - page
            free -= 0 if self._chunked else min(request.answer_tokens, _MOST_NEW_TOKENS)
        if free <= 0 and (chunks or self.waiting):
            self._is_full = bool(self.running)
        return chunks

    def _chunk(self, request: Request, tokens: int) -> tuple[Request, Chunk]:
        end = request.computed + tokens
        self._hold(request, end)
        if end < request.target:
            self._chunked = request
        return request, (request.computed, end)

    def _expected(self) -> float:
        """The tokens that decoding requests are expected to take. Nothing without a limit of the pool."""
        if self.pool.capacity is None:
            return 0.0
        left = [
            min(request.finish_step - self.pool.steps, _MOST_NEW_TOKENS)
            for request in self.running if request.finish_step >= 0
        ]  # fmt: skip
        return self.ratio * sum(left)

    def _make_room(self) -> bool:
        """Retract requests until the others have room for the next step. Whether any was retracted."""
        tokens = self.pace.tokens(1)
        if self.pool.growth(tokens) <= self.pool.free:
            return False
        steps = self.pool.steps
        kept = sorted(
            self.running, key=lambda r: (r.answer_tokens - (r.finish_step - steps), -r.prompt_tokens), reverse=True
        )
        while len(kept) > 1:
            request = kept.pop()
            self._preempt(request)
            self.waiting.append(request)
            if self.pool.growth(tokens) <= self.pool.free:
                break
        outputs = sum(request.answer_tokens - (request.finish_step - steps) for request in kept)
        longest = sum(request.answer_tokens for request in kept)
        self.ratio = min(1.0, (outputs + _RETRACT_STEPS * len(kept)) / (longest + 1))
        self._is_full = False
        return True

    def advance_tokens(self, steps: int, tokens: int) -> None:
        super().advance_tokens(steps, tokens)
        if self.ratio > _LEAST_RATIO:
            self.ratio = max(self.ratio - _DECAY * steps, _LEAST_RATIO)

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self._is_full = False


def _pages(tokens: int, page: int) -> int:
    """The tokens in whole pages."""
    return -(-tokens // page) * page
