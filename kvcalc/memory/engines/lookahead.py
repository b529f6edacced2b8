"""Room in the cache for drafted tokens: a running request needs slots for the tokens that a step drafts and checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.around import Around
from kvcalc.memory.engines.engine import Engine, Line, RunningPool
from kvcalc.memory.kv_cache import Growth
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvcalc.memory.engines.drafted_prefixes import Matching
    from kvcalc.memory.engines.prefixes import Prefixes

# The fewest tokens that SGLang allocates per step for drafts in trees: one for each branch of a tree of n-grams
# (speculative_ngram_max_bfs_breadth).
_LEAST_IN_TREES = 10


def lookahead_tokens(engine: str, num_tokens: int, is_longest: bool, by_ngrams: bool = False) -> int:
    """The slots that a request of `engine` takes beyond its own tokens if `num_tokens` tokens are drafted per step.

    `is_longest`: the request is as long as the engine allows. `by_ngrams`: the drafts are n-grams, which SGLang drafts
    in trees.

    vLLM caps the slots at max_model_len (allocate_slots of v1/core/kv_cache_manager.py), so such a request takes no
    more. TensorRT-LLM prepares a step while the last one runs: its requests may grow by the drafted tokens of both, and
    by one less for layers or a model that draft in the same engine (max_seq_len in create_py_executor,
    py_executor_creator.py; get_num_extra_kv_tokens, _torch/speculative/utils.py). SGLang also keeps room for two steps:
    each takes the drafted tokens and the one before them, which is already counted once (get_alloc_reserve_per_decode,
    mem_cache/allocation_sizing.py, 0.5.23). llama.cpp, mlx-lm and Transformers draft fewer tokens at the end, and the
    formula (`logical`) counts a request's tokens alone.
    """
    if engine == "sglang":
        return 2 * max(num_tokens + 1, _LEAST_IN_TREES if by_ngrams else 0) - 1
    if engine == "tensorrt-llm":
        return 2 * num_tokens if by_ngrams else 3 * num_tokens - 1
    return num_tokens if engine == "vllm" and not is_longest else 0


class LookAhead(Around):
    """`engine`, with `slots` more tokens in every running request. `matching` is which prefixes it finds again.

    What the engine prints about its pool (`blocks`) is about a request without them, except the bytes of a request.
    """

    def __init__(self, engine: Engine, slots: int, matching: Matching | None = None) -> None:
        super().__init__(engine)
        self._slots, self._matching = slots, matching

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        from kvcalc.memory.engines.drafted_prefixes import PLAIN, DraftedPrefixes

        found = self._engine.prefixes(share, dtype, whole)
        return DraftedPrefixes(found, self._slots, self._matching or PLAIN)

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self._engine.growth_tokens(share, dtype)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return self._engine.cache_bytes(cache, tokens + self._slots, dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.held_bytes(share, dtype, tokens + self._slots, batch)

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.batch_bytes(share, dtype, tokens + self._slots, batch)

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.all_stages_bytes(share, dtype, tokens + self._slots, batch)

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        return self._engine.replica_bytes(spec, dtype, tokens + self._slots, batch)

    def largest_stage(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> ModelSpec:
        return self._engine.largest_stage(share, dtype, tokens + self._slots, batch)

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """The growth of the engine at the request's end. The bytes of the slots do not grow with the context."""
        found = self._engine.growth(spec, dtype, tokens + self._slots)
        return Growth(found.bytes_per_token, found.fixed_bytes + found.bytes_per_token * self._slots)

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        return self._engine.max_running_requests(share, dtype, memory, tokens + self._slots, shared_tokens)

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> dict[str, Any]:
        found = self._engine.blocks(share, dtype, tokens, batch, memory)
        return {**found, "request_bytes": self.held_bytes(share, dtype, tokens, 1)} if found else found

    def most_running(
        self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int, shared_tokens: int = 0
    ) -> int | None:
        lengths = prompt_tokens + self._slots, tokens + self._slots
        return self._engine.most_running(share, dtype, memory, *lengths, shared_tokens)

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """That of requests without the slots: a simulation adds those of each step."""
        return self._engine.running_pool(share, dtype, longest_tokens, batch, memory)

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return self._engine.host_bytes(share, dtype, tokens + self._slots, batch)

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        more = self.held_bytes(share, dtype, tokens, 1) - self._engine.held_bytes(share, dtype, tokens, 1)
        return _with_slots(self._engine.lines(share, dtype, tokens), more)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        more = self.held_bytes(share, dtype, tokens, batch) - self._engine.held_bytes(share, dtype, tokens, batch)
        return _with_slots(self._engine.pool(share, dtype, tokens, batch), more)


def _with_slots(lines: list[Line] | None, more: int) -> list[Line] | None:
    return [*lines, Line("slots for drafted tokens", more)] if lines is not None and more else lines
