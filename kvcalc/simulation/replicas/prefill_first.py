"""Schedulers that compute prompts first, with a part of the answers kept free (`Schedule.new_tokens`).

A request starts if a ratio of the answers still to come is free besides its own (`Schedule.new_tokens`). If the next
decode step finds no room, the requests with the shortest answers so far are retracted, and the ratio rises. The rules
and their source are in `kvcalc.engines.sglang.scheduler`.
"""

from __future__ import annotations

from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.pool import BlockPool
from kvcalc.simulation.replicas.prefix_cache import PrefixCache
from kvcalc.simulation.replicas.replica import Plan, Replica
from kvcalc.simulation.replicas.rules import Rules
from kvcalc.simulation.replicas.times import Chunk, StepTimes


class PrefillFirstReplica(Replica):
    """Steps with prompts alone, then steps that decode. A unit of the pool is a token, and a block is a page."""

    names_early = False

    def __init__(
        self, rules: Rules, times: StepTimes, pool: BlockPool, arrivals: Arrivals, prefixes: PrefixCache | None = None
    ) -> None:
        super().__init__(rules, times, pool, arrivals, prefixes)
        ratio = self.schedule.new_tokens
        if ratio is None:
            raise ValueError(f"{self.schedule.name}: without a ratio of new tokens")
        self.ratio, self._new_tokens, self._decay = ratio.first, ratio, (ratio.first - ratio.least) / ratio.steps
        self._is_full = self._has_retracted = self._decodes_beside = False
        self._chunked: Request | None = None
        # What the scheduler does not know yet: the tokens that each decoding request got in the last step or, if that
        # step computed prompts, the requests that got their first tokens.
        self._unread_tokens = 0
        self._joined: dict[Request, None] = {}

    def plan(self) -> Plan:
        plan = super().plan()
        self._read_prompts()
        return plan

    def _read_prompts(self) -> None:
        """Requests find the blocks of the prompts that the last step computed."""
        for request in self._joined:
            if request in self.running:
                self._name_blocks(request, request.target)

    def _schedule(self) -> Plan:
        if self._chunked is not None:
            self._name_blocks(self._chunked, self._chunked.computed)
        # An instance that sends its caches forgets that its batch was full.
        if self._chunked is not None or not self._batch_size() or self.rules.sends:
            self._is_full = False
        if self._chunked is not None or (self.waiting and not self._is_full):
            chunks = self._prompts()
            if chunks:
                # Decoding requests sit out a step that leaves no room for their tokens.
                has_room = self.pool.growth(self.pace.next) <= self.pool.free
                self._decodes_beside = self.schedule.mixes and has_room
                return chunks, 1
        if not self.decoding:
            if not self._leaving:
                self.ratio = self._new_tokens.first
            return [], 0
        if self.pool.growth(self.pace.next) <= self.pool.free:
            return [], self._possible_steps()
        if self._leaving:
            return [], 0  # they give their tokens back first
        self._retract()
        return [], 1

    def _batch_size(self) -> int:
        """The requests of the decoding batch, as far as the scheduler knows."""
        return self.decoding + len(self._leaving)

    def _unread(self, request: Request) -> int:
        """The tokens of a request in the decoding batch that the scheduler does not know yet."""
        return 1 if request in self._joined else self._unread_tokens

    def _prompts(self) -> list[tuple[Request, Chunk]]:
        """The chunks of a step with prompts. Their tokens are taken."""
        page, most_tokens = self.pool.block_tokens, self._new_tokens.most_tokens
        more = page + self.rules.lookahead_tokens
        # The tokens of decoding requests that the step computes too.
        mixed = self._batch_size() * self.rules.checked_tokens if self.schedule.mixes else 0
        left, free = self.rules.step_tokens - mixed, self.pool.free - self._expected() - mixed
        inputs = (self.schedule.enough_tokens or self.rules.step_tokens) - mixed
        if left <= 0:
            return []
        # A batch that is full without decoding requests is forgotten: the requests that start now take its place.
        fills, has_started, chunks = self._batch_size() > 0, False, []
        if self._chunked is not None:
            request, self._chunked = self._chunked, None
            limit = min(left, int(free)) if int(free) > 0 else left
            taken = min(limit, request.target - request.computed)
            chunks.append(self._chunk(request, taken))
            left, free = left - _pages(taken, page), free - _pages(taken, page) - more
            inputs -= _pages(taken, page)
            free -= min(request.answer_tokens, most_tokens)
        while self.waiting and left > 0 and inputs > 0:
            request = self.waiting[0]
            if len(self.running) >= self.rules.max_running:
                self._is_full = fills
                break
            needed = request.target - self._found_in_use(request, 0)
            missed = request.target - request.cached_tokens
            most_new = min(request.answer_tokens - request.outputs, most_tokens)
            # The tokens that are found in the prefix cache take memory too, if no other request uses them.
            if needed + most_new + more >= free:
                self._is_full = fills
                break
            taken = missed if _pages(missed, page) <= left else left // page * page
            if not taken:
                break
            self.waiting.popleft()
            before = self.pool.free
            self._start(request)
            chunks.append(self._chunk(request, taken))
            has_started = True
            left, free = left - _pages(taken, page), free - (before - self.pool.free) - page
            inputs -= _pages(taken, page)
            free -= min(request.answer_tokens, most_tokens)
        if free <= 0 and (self.waiting or has_started):
            self._is_full = fills
        return chunks

    def _chunk(self, request: Request, tokens: int) -> tuple[Request, Chunk]:
        end = request.computed + tokens
        self._hold(request, end)
        if end < request.target:
            self._chunked = request
        return request, (request.computed, end)

    def _expected(self) -> float:
        """The tokens that the decoding batch is expected to take. Nothing without a limit of the pool."""
        if self.pool.capacity is None:
            return 0.0
        steps, joined, unread = self.pool.steps, self._joined, self._unread_tokens
        left = [
            request.finish_step - steps + (1 if request in joined else unread)
            for request in self.running
            if request.finish_step >= 0
        ]
        left += [self._unread(request) for request in self._leaving]
        most, ratio = self._new_tokens.most_tokens, self.ratio
        return sum([(tokens if tokens < most else most) * ratio for tokens in left])

    def _retract(self) -> None:
        """Retract requests until the others have room for the next step."""
        tokens = self.pace.next
        known = {r: r.answer_tokens - (r.finish_step - self.pool.steps) - self._unread(r) for r in self.running}
        kept = sorted(known, key=lambda r: (known[r], -r.prompt_tokens), reverse=True)
        while len(kept) > 1:
            request = kept.pop()
            self._preempt(request)
            self.waiting.append(request)
            if self.pool.growth(tokens) <= self.pool.free:
                break
        outputs = sum(known[request] for request in kept)
        longest = sum(request.answer_tokens for request in kept)
        self.ratio = min(1.0, (outputs + self._new_tokens.retract_steps * len(kept)) / (longest + 1))
        self._has_retracted = True

    def _preempt(self, request: Request) -> None:
        unread = self._unread(request)
        super()._preempt(request)
        # The tokens of the step that still runs are thrown away.
        request.outputs -= unread
        request.target -= unread
        if not request.outputs:
            request.first_token = request.last_token = None

    def _first_token(self, request: Request) -> int:
        if not self.schedule.overlaps:
            self._name_blocks(request, request.computed)
        return super()._first_token(request)

    def decodes_beside(self) -> bool:
        return self._decodes_beside

    def run_step(self, chunks: list[tuple[Request, Chunk]], seconds: float, tokens: int) -> int:
        ratio = self.ratio
        gaps = super().run_step(chunks, seconds, tokens)
        if chunks:
            self.ratio = ratio  # it only falls in steps that decode alone
        if chunks and self.schedule.overlaps:
            self._unread_tokens = tokens
            self._joined = {request: None for request, (_, end) in chunks if end == request.target}
        return gaps

    def advance_tokens(self, steps: int, tokens: int) -> None:
        self.context += tokens * self.decoding
        self.pool.advance(tokens)
        # The step that retracts leaves the ratio as it is.
        if self.ratio > self._new_tokens.least:
            ratio, least = self.ratio - self._decay * (steps - self._has_retracted), self._new_tokens.least
            self.ratio = ratio if ratio > least else least
        self._has_retracted = False
        if self.schedule.overlaps:
            self._unread_tokens = self.pace.last
            if self._joined:
                self._joined = {}

    def _release(self, request: Request, named_tokens: int | None = None) -> None:
        super()._release(request, named_tokens)
        self._is_full = False

    def _let_go(self, promised: int) -> None:
        self._read_prompts()
        super()._let_go(promised)
        self._unread_tokens = 0
        self._joined.clear()


def _pages(tokens: int, page: int) -> int:
    """The tokens in whole pages."""
    return -(-tokens // page) * page
