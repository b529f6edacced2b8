"""What an engine allocates for requests with drafted tokens and a common prefix.

An `Engine` counts requests that have nothing in common and draft nothing. An `Allocation` adds drafts and a common
prefix in the same way for every engine. Ask `Allocation.engine` for a fact of the engine, and the allocation for bytes.
"""

from __future__ import annotations

from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from kvcalc.engines.account import BatchLine, Line, PoolFigures, RunningPool
from kvcalc.engines.engine import Engine
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, growth, growth_at_slope, longest_context
from kvcalc.memory.reads import Reads, reads_of
from kvcalc.model.caches import Cache
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, all_caches, period
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.engines.prefixes import Matching, Prefixes


class Drafts(NamedTuple):
    """The model or head `drafter` that drafts tokens, and `engine`, which counts its cache in a pool of its own."""

    engine: Engine
    drafter: ModelSpec


class Requests(NamedTuple):
    """What requests have beside their own tokens.

    All have their first `prefix_tokens` tokens in common, and this prefix is in the cache. Each has `slots` more tokens
    for drafts. `matching` says which prefixes are found while tokens are drafted; None if nothing is drafted. `drafts`
    is None if no drafter has a pool of its own.
    """

    prefix_tokens: int = 0
    slots: int = 0
    matching: Matching | None = None
    drafts: Drafts | None = None


PLAIN = Requests()


class Allocation:
    """The bytes that `engine` allocates for `requests`.

    A share holds the layers of the model and of what drafts for it (`ModelSpec.first_draft_layer`). The methods are
    those of `Engine`, and so is what they raise. A drafter with a pool of its own is only for one pipeline stage.
    """

    def __init__(self, engine: Engine, requests: Requests = PLAIN) -> None:
        self.engine, self.requests = engine, requests
        self._slots, self._drafts = requests.slots, requests.drafts
        self._is_plain = requests == PLAIN

    def alone(self) -> Allocation:
        """The allocation of the same requests without a common prefix."""
        return Allocation(self.engine, self.requests._replace(prefix_tokens=0)) if self.requests.prefix_tokens else self

    def of(self, engine: Engine) -> Allocation:
        """The allocation of the same requests by another engine."""
        return Allocation(engine, self.requests)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        drafts = self._drafts
        engine = self.engine if drafts is None or cache in all_caches(self.engine.spec) else drafts.engine
        return engine.cache_bytes(cache, tokens + self._slots, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        shared = self._shared_bytes(share, dtype, tokens, batch)
        if shared is not None:
            return shared
        return sum([engine.held_bytes(part, dtype, tokens + self._slots, batch) for engine, part in self._parts(share)])

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        if self._is_plain:
            return self.engine.batch_bytes(share, dtype, tokens, batch)
        if self._shared(share, dtype, tokens):
            return max([self.held_bytes(stage, dtype, tokens, batch) for stage in self.engine.device_stages(share)])
        return sum(
            [engine.batch_bytes(part, dtype, tokens + self._slots, batch) for engine, part in self._parts(share)]
        )

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        parts = self._parts(share)
        total = sum([engine.all_stages_bytes(part, dtype, tokens + self._slots, batch) for engine, part in parts])
        if not self._shared(share, dtype, tokens):
            return total
        if self.engine.bounds:
            return sum([self.held_bytes(stage, dtype, tokens, batch) for stage in self.engine.device_stages(share)])
        # vLLM takes the same number of blocks on every stage, so all stages save the same part.
        held = self.alone().held_bytes(share, dtype, tokens, batch)
        return total * self.held_bytes(share, dtype, tokens, batch) // held if held else total

    def largest_stage(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> ModelSpec:
        if self._drafts is not None:
            return share
        if not self.engine.bounds or not self._shared(share, dtype, tokens):
            return self.engine.largest_stage(share, dtype, tokens + self._slots, batch)
        return max(self.engine.device_stages(share), key=lambda stage: self.held_bytes(stage, dtype, tokens, batch))

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        shared = self._shared_bytes(spec, dtype, tokens, batch, whole=True)
        if shared is not None:
            return shared
        return sum(
            [engine.replica_bytes(part, dtype, tokens + self._slots, batch) for engine, part in self._parts(spec)]
        )

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return sum([engine.host_bytes(part, dtype, tokens + self._slots, batch) for engine, part in self._parts(share)])

    def start_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        return self.engine.start_bytes(self._own(share), dtype, tokens)

    def start_limit(self, share: ModelSpec, dtype: Dtype, memory: int) -> int | None:
        return self.engine.start_limit(self._own(share), dtype, memory)

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine | None:
        return self.engine.batch_line(share, dtype, tokens) if self._is_plain else None

    def longest_context(self, share: ModelSpec, dtype: Dtype, batch: int, memory: int) -> int | None:
        if self._is_plain:
            return self.engine.longest_context(share, dtype, batch, memory)
        return longest_context(lambda tokens: self.batch_bytes(share, dtype, tokens, batch), memory, period(share))

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """A token after the prefix adds what it adds to a request alone. The bytes of the slots do not grow."""
        if self.requests.prefix_tokens:
            slope = self.alone().growth(spec, dtype, tokens).bytes_per_token
            return growth_at_slope(slope, self.replica_bytes(spec, dtype, tokens), tokens)
        if self._drafts is None:
            growing = self.engine.growth(spec, dtype, tokens + self._slots)
        else:
            alone = Allocation(self.engine, Requests(drafts=self._drafts))
            steps = self.growth_tokens(spec, dtype)
            growing = growth(partial(alone.replica_bytes, spec, dtype), tokens + self._slots, steps)
        return Growth(growing.bytes_per_token, growing.fixed_bytes + growing.bytes_per_token * self._slots)

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return lcm(*[engine.growth_tokens(part, dtype) for engine, part in self._parts(share)])

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        """The figures of the engine's own pool for a request alone, but the bytes of a request with its drafts."""
        if self._is_plain:
            return self.engine.blocks(share, dtype, tokens, batch, memory)
        memory = None if memory is None else self._of_own(share, dtype, tokens, batch, memory)
        blocks = self.engine.blocks(self._own(share), dtype, tokens, batch, memory)
        held = self.alone().held_bytes(share, dtype, tokens, 1)
        if blocks.pool is not None:
            return blocks._replace(pool=blocks.pool._replace(request_bytes=held))
        return blocks._replace(own={**blocks.own, "request_bytes": held}) if blocks.own else blocks

    def max_running_requests(self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1) -> int | None:
        own, shared = self._own(share), self._shared(share, dtype, tokens)
        return self.engine.max_running_requests(own, dtype, memory, tokens + self._slots, shared)

    def most_running(self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int) -> int | None:
        memory = self._of_own(share, dtype, tokens, 1, memory)
        lengths = prompt_tokens + self._slots, tokens + self._slots
        shared = self._shared(share, dtype, prompt_tokens)
        return self.engine.most_running(self._own(share), dtype, memory, *lengths, shared)

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """The engine's own pool: a simulation follows the slots of each step, and what requests have in common."""
        memory = self._of_own(share, dtype, longest_tokens, batch, memory)
        return self.engine.running_pool(self._own(share), dtype, longest_tokens, batch, memory)

    def reads(self, share: ModelSpec, dtype: Dtype) -> Reads:
        """The bytes that one decode step reads of the cache of this share, as the engine stores it."""
        if self._drafts is None:
            return self.engine.reads(share, dtype)
        return reads_of(entries for engine, part in self._parts(share) for entries in engine.reads(part, dtype).entries)

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        return self._with_others(self.engine.lines(self._own(share), dtype, tokens), share, dtype, tokens, 1)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        lines = self._with_others(self.engine.pool(self._own(share), dtype, tokens, batch), share, dtype, tokens, batch)
        shared = self._shared_bytes(share, dtype, tokens, batch)
        less = 0 if shared is None else shared - self.alone().held_bytes(share, dtype, tokens, batch)
        if not less:
            return lines
        if lines is None:
            one = self.lines(share, dtype, tokens)
            if one is None:
                return None
            lines = [Line(name, batch * size) for name, size in one]
        return [*lines, Line("prefix kept once", less)]

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        parts = [engine.prefixes(part, dtype, whole) for engine, part in self._parts(share)]
        if self.requests.matching is None and not self._slots and len(parts) == 1:
            return parts[0]
        from kvcalc.engines.prefixes import PLAIN as MATCHES
        from kvcalc.engines.prefixes import DraftedPrefixes

        return DraftedPrefixes(parts, self._slots, self.requests.matching or MATCHES)

    def _own(self, share: ModelSpec) -> ModelSpec:
        """The layers of `share` in the engine's own pool."""
        return share if self._drafts is None else own_part(share)

    def _parts(self, share: ModelSpec) -> list[tuple[Engine, ModelSpec]]:
        """The engine with the layers of the model, and the drafter's with those that draft tokens."""
        if self._drafts is None:
            return [(self.engine, share)]
        drafts = draft_part(share, self._drafts.drafter)
        own = (self.engine, own_part(share))
        return [own, (self._drafts.engine, drafts)] if drafts.layers else [own]

    def _of_own(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int) -> int:
        """The part of `memory` that the engine's own pool gets: both pools have as many tokens."""
        if self._drafts is None:
            return memory
        held = [engine.held_bytes(part, dtype, tokens, batch) for engine, part in self._parts(share)]
        return memory * held[0] // max(1, sum(held))

    def _with_others(
        self, lines: list[Line] | None, share: ModelSpec, dtype: Dtype, tokens: int, batch: int
    ) -> list[Line] | None:
        """`lines` of the engine's own pool, with those of the drafter and of the slots."""
        if lines is None or self._is_plain:
            return lines
        held = [engine.held_bytes(part, dtype, tokens, batch) for engine, part in self._parts(share)]
        drafts, slots = sum(held[1:]), self.alone().held_bytes(share, dtype, tokens, batch) - sum(held)
        added = ("cache of the draft model", drafts), ("slots for drafted tokens", slots)
        return [*lines, *(Line(name, size) for name, size in added if size)]

    def _shared(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        """The tokens of the prefix that requests of `tokens` tokens keep once.

        The engine computes at least the last token of a prompt again.
        """
        prefix = self.requests.prefix_tokens
        return self.prefixes(share, dtype).shared(min(prefix, tokens - 1)) if prefix else 0

    def _shared_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, whole: bool = False) -> int | None:
        """The bytes of a batch. None if its requests share nothing."""
        if not self.requests.prefix_tokens:
            return None
        prefixes = self.prefixes(share, dtype, whole)
        shared = prefixes.shared(min(self.requests.prefix_tokens, tokens - 1))
        return prefixes.batch_bytes(shared, tokens, batch) if shared else None


@remembered
def own_part(share: ModelSpec) -> ModelSpec:
    """The layers of `share` that belong to the model, and not to what drafts for it."""
    first = share.first_draft_layer
    if first is None:
        return share
    return share._replace(layers=tuple(group for group in share.layers if group.first < first))


@remembered_of_two
def draft_part(share: ModelSpec, drafter: ModelSpec) -> ModelSpec:
    """`drafter` with the layers of `share` that draft tokens, numbered from 0. It may have no layers."""
    first = share.first_draft_layer
    if first is None:
        return drafter._replace(layers=())
    moved = (g._replace(first=g.first - first, last=g.last - first) for g in share.layers if g.first >= first)
    return drafter._replace(layers=tuple(moved))
