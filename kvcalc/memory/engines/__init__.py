"""What each engine holds for a workload: one module per engine, one interface.

An engine's module has `engine(spec, settings)`, which returns an `Engine`: above all the function that counts, for one
cache and a number of tokens, the bytes of one sequence in one layer. A new engine is one module, one line in `ENGINES`
and its options in `options.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from kvcalc.errors import UsageError, nearest
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines.options import check_settings
from kvcalc.memory.kv_cache import CountBytes, Growth, growth, sequence_bytes
from kvcalc.memory.sharding import Bounds, bounds_of, longer_before_last, stages_of
from kvcalc.model.spec import ModelSpec, period
from kvcalc.notes import Note

# name -> module here.
ENGINES = {
    "logical": "logical",
    "transformers": "transformers",
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm",
    "llama.cpp": "llama_cpp",
}

# Engines seen to reserve a pool for encoder models all the same: SGLang for bge-m3 (sgl-project/sglang#7590),
# llama.cpp of early 2025 for BERT and nomic-embed (ggml-org/llama.cpp#12836, #12817).
_POOLS_FOR_ENCODERS = {"sglang": "SGLang", "llama.cpp": "llama.cpp before mid-2025"}

# Engines whose rules are read for several releases: `vllm@0.11` is vLLM as of 0.11.
_WITH_RELEASES = ("vllm",)

# Engines that group the layers of all pipeline stages together, before each stage takes its own: their modules cut.
_GROUPS_ACROSS_STAGES = ("vllm",)

CountSequence = Callable[[ModelSpec, Dtype, int], int]
"""Bytes one sequence of so many tokens takes on a device that holds this share of a model."""

CountBatch = Callable[[ModelSpec, Dtype, int, int], int]
"""Bytes a batch of so many sequences, each of so many tokens, takes on a device that holds this share of a model."""


class Line(NamedTuple):
    """A part of what a request takes, by name; negative where an engine keeps less than is stored."""

    name: str
    bytes: int


class Engine(NamedTuple):
    """How an engine counts: its name, the version asked for or else the one its rules were read from, its settings,
    notes, and how it counts a share of a model, all layers on one tensor-parallel rank. Where a replica has pipeline
    stages, a device is one of the stage that holds most.

    - `cache_bytes`: bytes one sequence takes in one layer's cache;
    - `sequence_bytes`: bytes it takes in all of them on one device, the device's share of the model given; None where
      that is the sum of `cache_bytes`;
    - `blocks`: what the engine prints of its pool for a batch, and for the memory there is for it, or None;
    - `growth_tokens`: after how many tokens its bytes grow alike, a block's; None where that is the model's own period;
    - `lines`: where the bytes of a sequence go, adding up to `sequence_bytes`;
    - `pool`: where the bytes of a batch of so many sequences go, adding up to what the engine allocates for it; None
      where that is as many times a sequence;
    - `splits_heads`: whether tensor parallelism is counted for it;
    - `pool_bytes`: the sum of `pool`, where it can be had for less than the parts;
    - `stages_bytes`: bytes a batch takes on all pipeline stages together; None where there is one stage;
    - `uncut`: the same engine with one stage, where a replica is counted by that before it is cut;
    - `check_context`: raises UsageError for a context that the settings do not admit.
    """

    name: str
    version: str | None
    cache_bytes: CountBytes
    settings: dict[str, object]
    notes: tuple[Note, ...] = ()
    sequence_bytes: CountSequence | None = None
    blocks: Callable[[ModelSpec, Dtype, int, int, int | None], dict[str, object]] | None = None
    growth_tokens: Callable[[ModelSpec, Dtype], int] | None = None
    lines: Callable[[ModelSpec, Dtype, int], list[Line]] | None = None
    pool: Callable[[ModelSpec, Dtype, int, int], list[Line]] | None = None
    splits_heads: bool = True
    pool_bytes: CountBatch | None = None
    stages_bytes: CountBatch | None = None
    uncut: Engine | None = None
    check_context: Callable[[int], None] | None = None

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        """Bytes one sequence takes on a device that holds this share of the model: a pool's for it alone."""
        if self.pool is not None or self.pool_bytes is not None:
            return self.batch_bytes(share, dtype, tokens, 1)
        if self.sequence_bytes is not None:
            return self.sequence_bytes(share, dtype, tokens)
        return sequence_bytes(share, dtype, tokens, self.cache_bytes)

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes a batch of sequences takes on a device that holds this share of the model."""
        if self.pool_bytes is not None:
            return self.pool_bytes(share, dtype, tokens, batch)
        if self.pool is not None:
            return sum(line.bytes for line in self.pool(share, dtype, tokens, batch))
        return batch * self.held_bytes(share, dtype, tokens)

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes a batch takes on one rank of every pipeline stage together."""
        count = self.stages_bytes or self.batch_bytes
        return count(share, dtype, tokens, batch)

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        """Bytes a batch takes in one replica of the model, before it is split over devices."""
        return (self.uncut or self).all_stages_bytes(spec, dtype, tokens, batch)

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """How a replica's bytes grow at a context."""
        step = self.growth_tokens(spec, dtype) if self.growth_tokens else period(spec)
        return growth(lambda t: self.replica_bytes(spec, dtype, t), tokens, step)


def load_engine(name: str, spec: ModelSpec, settings: Mapping[str, str] | None = None, stages: int = 1) -> Engine:
    """The accounting of engine `name` for `spec` cut into pipeline `stages`, under the engine's own `settings` (option
    name to text).

    `name` may end in a release where rules are known for several: `vllm@0.11`. Every engine but `logical` keeps
    nothing of an encoder after its forward pass. Raises UsageError (exit 2) for an unknown name or a setting the
    engine does not have, ModelError (exit 3) for a model whose layout in the engine is not established.
    """
    module, release = _module(name)
    name, settings = name.partition("@")[0], settings or {}
    check_settings([name], settings, has_device=True)
    if spec.is_encoder and name != "logical":
        pool = _POOLS_FOR_ENCODERS.get(name)
        text = f"{pool} was seen to reserve a pool for encoders; its size follows the memory, not the request"
        return Engine(name, None, _nothing, {}, (Note("engine", "encoder-pool", text),) if pool else ())
    if name in _GROUPS_ACROSS_STAGES:
        grouped: Engine = module.engine(spec, settings, release, stages)
        return grouped
    engine: Engine = module.engine(spec, settings)
    return engine if stages == 1 else _in_stages(engine, stage_bounds(name, spec.num_layers, stages))


def stage_bounds(name: str, num_layers: int, stages: int) -> Bounds:
    """The layers of every pipeline stage as engine `name` cuts a model: by its module's `cut`, if it has one."""
    return bounds_of(getattr(_module(name)[0], "cut", longer_before_last)(num_layers, stages))


def _in_stages(engine: Engine, bounds: Bounds) -> Engine:
    """`engine` for a replica of several pipeline stages: what it says of a device is of the stage that holds most."""

    def sizes(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[int]:
        return [engine.batch_bytes(stage, dtype, tokens, batch) for stage in stages_of(share, bounds)]

    def largest(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> ModelSpec:
        held = sizes(share, dtype, tokens, batch)
        return stages_of(share, bounds)[held.index(max(held))]

    blocks, lines, pool = engine.blocks, engine.lines, engine.pool
    return engine._replace(
        pool_bytes=lambda *asked: max(sizes(*asked)),
        stages_bytes=lambda *asked: sum(sizes(*asked)),
        uncut=engine,
        blocks=blocks and (lambda share, *asked: blocks(largest(share, *asked[:3]), *asked)),
        lines=lines and (lambda share, dtype, tokens: lines(largest(share, dtype, tokens, 1), dtype, tokens)),
        pool=pool and (lambda share, *asked: pool(largest(share, *asked), *asked)),
    )


def resolve_kv_dtype(
    name: str, spec: ModelSpec, asked: str, settings: Mapping[str, str] | None = None, dtype: str | None = None
) -> tuple[str | Dtype, str | None]:
    """The cache's dtype as engine `name` resolves `asked`, and why; `asked` as it is where the engine has no own rule.

    A module's `kv_dtype(spec, asked, settings, dtype)` is that rule; `dtype` is the weights', as asked for. Raises
    UsageError (exit 2) for an unknown engine.
    """
    rule = getattr(_module(name)[0], "kv_dtype", None)
    return rule(spec, asked, settings or {}, dtype) if rule else (asked, None)


def check_engine(name: str) -> None:
    """UsageError (exit 2) for an engine nobody knows, with the nearest names."""
    _module(name)


def _module(asked: str) -> tuple[ModuleType, str | None]:
    """An engine's module and the release asked for, None for the newest."""
    name, at, release = asked.partition("@")
    if name not in ENGINES:
        raise UsageError(f"--engine {name!r}: not an engine", nearest(name, ENGINES) or f"one of {', '.join(ENGINES)}")
    if at and name not in _WITH_RELEASES:
        raise UsageError(f"--engine {asked[:40]!r}: releases are told apart for {', '.join(_WITH_RELEASES)} alone")
    if at and not release:
        raise UsageError(f"--engine {asked!r}: a release is missing", f"write {name}@0.11, or {name} for the newest")
    return import_module(f"kvcalc.memory.engines.{ENGINES[name]}"), release or None


def _nothing(cache: object, tokens: int, dtype: object) -> int:
    return 0
