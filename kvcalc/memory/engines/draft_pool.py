"""A model that drafts tokens with a cache of its own, beside the cache of the model that it drafts for."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.around import Around
from kvcalc.memory.engines.engine import Engine, Line, RunningPool
from kvcalc.memory.reads import Entries
from kvcalc.model.caches import Cache
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.spec import ModelSpec, all_caches

if TYPE_CHECKING:
    from kvcalc.memory.engines.prefixes import Prefixes

# These put the layers of any drafter into the model's own cache: the formula, which adds up layers, and vLLM, whose
# cache spec has every attention layer of both models (get_kv_cache_spec, v1/worker/gpu_model_runner.py).
JOINED = ("logical", "vllm")


class DraftPool(Around):
    """The rules of `engine` for a model, and those of `drafts` for the model or head `drafter` that drafts for it.

    A share holds the layers of both. `first_draft_layer` tells them apart. Only for one pipeline stage.
    """

    def __init__(self, engine: Engine, drafts: Engine, drafter: ModelSpec) -> None:
        super().__init__(engine)
        self._drafts, self._drafter = drafts, drafter

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        rules = self._engine if cache in all_caches(self.spec) else self._drafts
        return rules.cache_bytes(cache, tokens, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.held_bytes(own_part(share), dtype, tokens, batch) + self._added(share, dtype, tokens, batch)

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        own, drafts = own_part(share), draft_part(share, self._drafter)
        added = self._drafts.batch_bytes(drafts, dtype, tokens, batch) if drafts.layers else 0
        return self._engine.batch_bytes(own, dtype, tokens, batch) + added

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self.batch_bytes(share, dtype, tokens, batch)  # there is one stage

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        drafts = draft_part(share, self._drafter)
        added = self._drafts.host_bytes(drafts, dtype, tokens, batch) if drafts.layers else 0
        return self._engine.host_bytes(own_part(share), dtype, tokens, batch) + added

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        parts = (self._engine, own_part(share)), (self._drafts, draft_part(share, self._drafter))
        return [each for engine, part in parts if part.layers for each in engine.entries(part, dtype)]

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        from kvcalc.memory.engines.drafted_prefixes import JointPrefixes

        own, drafts = self._engine.prefixes(own_part(share), dtype, whole), draft_part(share, self._drafter)
        return JointPrefixes(own, self._drafts.prefixes(drafts, dtype, whole)) if drafts.layers else own

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        drafts = draft_part(share, self._drafter)
        own = self._engine.growth_tokens(own_part(share), dtype)
        return lcm(own, self._drafts.growth_tokens(drafts, dtype)) if drafts.layers else own

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> dict[str, Any]:
        """The figures of the model's own pool, and the bytes of a request in both.

        Both pools have as many tokens, so they share the memory by size.
        """
        own = own_part(share)
        memory = None if memory is None else self._of_own(share, dtype, tokens, batch, memory)
        found = self._engine.blocks(own, dtype, tokens, batch, memory)
        return {**found, "request_bytes": self.held_bytes(share, dtype, tokens, 1)} if found else found

    def most_running(
        self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int, shared_tokens: int = 0
    ) -> int | None:
        memory = self._of_own(share, dtype, tokens, 1, memory)
        return self._engine.most_running(own_part(share), dtype, memory, prompt_tokens, tokens, shared_tokens)

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        memory = self._of_own(share, dtype, longest_tokens, batch, memory)
        return self._engine.running_pool(own_part(share), dtype, longest_tokens, batch, memory)

    def _of_own(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int) -> int:
        """The part of `memory` that the model's own pool gets."""
        held = self._engine.held_bytes(own_part(share), dtype, tokens, batch)
        return memory * held // max(1, held + self._added(share, dtype, tokens, batch))

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        return self._engine.max_running_requests(own_part(share), dtype, memory, tokens, shared_tokens)

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        return self._with_drafts(self._engine.lines(own_part(share), dtype, tokens), share, dtype, tokens, 1)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        return self._with_drafts(self._engine.pool(own_part(share), dtype, tokens, batch), share, dtype, tokens, batch)

    def _added(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        drafts = draft_part(share, self._drafter)
        return self._drafts.held_bytes(drafts, dtype, tokens, batch) if drafts.layers else 0

    def _with_drafts(
        self, lines: list[Line] | None, share: ModelSpec, dtype: Dtype, tokens: int, batch: int
    ) -> list[Line] | None:
        added = self._added(share, dtype, tokens, batch)
        return [*lines, Line("cache of the draft model", added)] if lines is not None and added else lines


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
