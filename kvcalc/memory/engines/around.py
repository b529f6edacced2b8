"""Rules of an engine that are changed in some methods, and otherwise the engine's own."""

from __future__ import annotations

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.engine import Engine
from kvcalc.memory.engines.release import Asked
from kvcalc.memory.reads import Entries
from kvcalc.memory.sharding import Bounds
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec

TAKEN = (
    "name", "version", "spec", "settings", "bounds", "notes", "splits_heads", "splits_layers", "older_rules",
    "reserves_full_length", "running_option", "placement", "token_ranks", "prompt_ranks", "has_attention_replicas",
    "limits_all_replicas", "splits_attention_replicas", "splits_uneven_experts", "spreads_mlps",
    "spreads_head", "divides_decode", "prefixes_off", "can_place", "micro_batch_tokens",
)  # fmt: skip
"""What `Around` takes from the engine: everything that is not a method."""


class Around(Engine):
    """The rules of `engine`, which a subclass changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        for name in TAKEN:
            setattr(self, name, getattr(engine, name))

    def check_ranks(self, spec: ModelSpec, tensor_parallel_size: int) -> None:
        self._engine.check_ranks(spec, tensor_parallel_size)

    def check_context(self, tokens: int) -> None:
        self._engine.check_context(tokens)

    def stage_bounds(self, num_layers: int, stages: int) -> Bounds:
        return self._engine.stage_bounds(num_layers, stages)

    def start_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        return self._engine.start_bytes(share, dtype, tokens)

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        return self._engine.entries(share, dtype)

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        return self._engine.entry_sizes(cache, dtype)

    def attended(self, share: ModelSpec) -> ModelSpec:
        return self._engine.attended(share)

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        return self._engine.max_running_requests(share, dtype, memory, tokens, shared_tokens)

    def block_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self._engine.block_tokens(share, dtype)

    def prompt_stops(self, spec: ModelSpec) -> tuple[int, ...]:
        return self._engine.prompt_stops(spec)

    def divide_cache(self, share: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
        return self._engine.divide_cache(share)

    def rules_used(self, asked: Asked) -> str | None:
        return self._engine.rules_used(asked)
