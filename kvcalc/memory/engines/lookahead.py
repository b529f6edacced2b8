"""Room in the cache for drafted tokens: a running request needs slots for the tokens that a step drafts and checks."""

from __future__ import annotations

from typing import Any

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.around import Around
from kvcalc.memory.kv_cache import Growth
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec

# Engines whose requests may grow beyond the longest length by the drafted tokens: SGLang (extra_max_context_len of
# model_runner_kv_cache_mixin.py) and TensorRT-LLM (max_seq_len in create_py_executor, py_executor_creator.py).
_BEYOND_LENGTH = ("sglang", "tensorrt-llm")


def lookahead_tokens(engine: str, num_tokens: int, is_longest: bool) -> int:
    """The slots that a request of `engine` takes beyond its own tokens if `num_tokens` tokens are drafted per step.

    `is_longest`: the request is as long as the engine allows. vLLM caps the slots at max_model_len (allocate_slots of
    v1/core/kv_cache_manager.py), so such a request takes no more. llama.cpp, mlx-lm and Transformers draft fewer tokens
    at the end, and the formula (`logical`) counts a request's tokens alone.
    """
    return num_tokens if engine in _BEYOND_LENGTH or (engine == "vllm" and not is_longest) else 0


class LookAhead(Around):
    """`engine`, with `slots` more tokens in every running request.

    What the engine prints about its pool (`blocks`) is about a request without them.
    """

    def __init__(self, engine: Engine, slots: int) -> None:
        super().__init__(engine)
        self._slots = slots

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

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> dict[str, Any]:
        return self._engine.blocks(share, dtype, tokens, batch, memory)

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        more = self.held_bytes(share, dtype, tokens, 1) - self._engine.held_bytes(share, dtype, tokens, 1)
        return _with_slots(self._engine.lines(share, dtype, tokens), more)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        more = self.held_bytes(share, dtype, tokens, batch) - self._engine.held_bytes(share, dtype, tokens, batch)
        return _with_slots(self._engine.pool(share, dtype, tokens, batch), more)


def _with_slots(lines: list[Line] | None, more: int) -> list[Line] | None:
    return [*lines, Line("slots for drafted tokens", more)] if lines is not None and more else lines
