"""Requests that have their first tokens in common, which an engine with a prefix cache keeps only once."""

from __future__ import annotations

from typing import Any

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.around import Around
from kvcalc.memory.engines.engine import Engine, Line, RunningPool
from kvcalc.memory.engines.prefixes import Prefixes
from kvcalc.memory.kv_cache import Growth, growth_at_slope
from kvcalc.memory.sharding import stages_of
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec


class SharedPrefix(Around):
    """`engine`, with requests that have their first `prefix_tokens` tokens in common. The prefix is in the cache.

    The engine computes at least the last token of a prompt again, so a context shares all its tokens but one at most.
    What the engine prints about its pool (`blocks`) is about a request alone.
    """

    def __init__(self, engine: Engine, prefix_tokens: int) -> None:
        super().__init__(engine)
        self.prefix_tokens = prefix_tokens

    def alone(self) -> Engine:
        return self._engine

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        return self._engine.prefixes(share, dtype, whole)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return self._engine.cache_bytes(cache, tokens, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        found = self._shared_bytes(share, dtype, tokens, batch)
        return self._engine.held_bytes(share, dtype, tokens, batch) if found is None else found

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        if self._shared(share, dtype, tokens):
            return super().batch_bytes(share, dtype, tokens, batch)
        return self._engine.batch_bytes(share, dtype, tokens, batch)

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        found = self._engine.all_stages_bytes(share, dtype, tokens, batch)
        if not self._shared(share, dtype, tokens):
            return found
        if self.bounds:
            return super().all_stages_bytes(share, dtype, tokens, batch)
        # vLLM takes the same number of blocks on every stage, so all stages save the same part.
        held = self._engine.held_bytes(share, dtype, tokens, batch)
        return found * self.held_bytes(share, dtype, tokens, batch) // held if held else found

    def largest_stage(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> ModelSpec:
        if not self.bounds or not self._shared(share, dtype, tokens):
            return self._engine.largest_stage(share, dtype, tokens, batch)
        return max(stages_of(share, self.bounds), key=lambda stage: self.held_bytes(stage, dtype, tokens, batch))

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        found = self._shared_bytes(spec, dtype, tokens, batch, whole=True)
        return self._engine.replica_bytes(spec, dtype, tokens, batch) if found is None else found

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """A token after the prefix adds what it adds to a request alone."""
        slope = self._engine.growth(spec, dtype, tokens).bytes_per_token
        return growth_at_slope(slope, self.replica_bytes(spec, dtype, tokens), tokens)

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self._engine.growth_tokens(share, dtype)

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> dict[str, Any]:
        return self._engine.blocks(share, dtype, tokens, batch, memory)

    def most_running(
        self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int, shared_tokens: int = 0
    ) -> int | None:
        shared = self._shared(share, dtype, prompt_tokens)
        return self._engine.most_running(share, dtype, memory, prompt_tokens, tokens, shared)

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """That of requests which share nothing: a simulation follows what is shared."""
        return self._engine.running_pool(share, dtype, longest_tokens, batch, memory)

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.host_bytes(share, dtype, tokens, batch)

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        return self._engine.max_running_requests(share, dtype, memory, tokens, self._shared(share, dtype, tokens))

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        return self._engine.lines(share, dtype, tokens)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        lines = self._engine.pool(share, dtype, tokens, batch)
        less = self.held_bytes(share, dtype, tokens, batch) - self._engine.held_bytes(share, dtype, tokens, batch)
        if not less:
            return lines
        if lines is None:
            one = self._engine.lines(share, dtype, tokens)
            if one is None:
                return None
            lines = [Line(name, batch * size) for name, size in one]
        return [*lines, Line("prefix kept once", less)]

    def _shared(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        """The tokens of the prefix that requests of `tokens` tokens keep once."""
        return self.prefixes(share, dtype).shared(min(self.prefix_tokens, tokens - 1))

    def _shared_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, whole: bool = False) -> int | None:
        """The bytes of a batch. None if its requests share nothing."""
        prefixes = self.prefixes(share, dtype, whole)
        shared = prefixes.shared(min(self.prefix_tokens, tokens - 1))
        return prefixes.batch_bytes(shared, tokens, batch) if shared else None
