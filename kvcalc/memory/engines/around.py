"""Rules of an engine that are changed in some methods, and otherwise the engine's own."""

from __future__ import annotations

from kvcalc.memory.engines import Engine
from kvcalc.model.spec import ModelSpec

TAKEN = (
    "name", "version", "spec", "settings", "bounds", "notes", "splits_heads", "splits_layers", "older_rules",
    "reserves_full_length", "running_option", "placement", "token_ranks", "has_attention_replicas",
    "limits_all_replicas", "splits_attention_replicas", "splits_uneven_experts", "spreads_mlps",
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
