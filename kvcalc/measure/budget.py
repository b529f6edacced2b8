"""What a run will need, computed before anything is allocated; and how large its prefill chunks may be."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import DoesNotFitError
from kvcalc.measure.parts import Part, parts_of
from kvcalc.measure.storage import Storage, predicted_bytes
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import longest_context, most_that_fit
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec
from kvcalc.units import format_size

# Largest temporary of one prefill step, in bytes; and of one CPU operation, in FLOP, so that Ctrl-C is heard in time.
_WORKSPACE_BYTES = 256 << 20
_CPU_FLOP = 2e10
_MAX_CHUNK_TOKENS = 512

# The part of free memory a run may take: the rest is for whatever else grows meanwhile. On a CPU that is every other
# process, and being wrong means swapping or being killed.
_USABLE_PERCENT = {"cpu": 85, "mps": 85, "cuda": 95}

# What torch, its kernels' scratch space and the roof's buffer take beside what is computed here.
_OVERHEAD_BYTES = 512 << 20


class Need(NamedTuple):
    """Bytes a run needs: attention weights, cache, temporaries."""

    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes


def weights_bytes_of(spec: ModelSpec, dtype: Dtype) -> int:
    """The projections of every part that is run; biases, norms and convolutions not counted."""
    hidden = spec.attention.hidden_size or 0
    return sum(part.parameters(hidden) for part in parts_of(spec)) * dtype.block_bytes


def need_of(
    spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int, kind: str, storage: Storage = Storage(),
    weights_bytes: int | None = None,
) -> Need:  # fmt: skip
    """What measuring `spec` takes on a device of `kind`. `weights_bytes` may be given where it is known."""
    shape = _widest(spec)
    weights = weights_bytes_of(spec, dtype) if weights_bytes is None else weights_bytes
    cache = predicted_bytes(spec, dtype, context_tokens, batch_size, storage)
    chunk = chunk_tokens(shape, context_tokens, batch_size, kind)
    workspace = _OVERHEAD_BYTES + chunk * _workspace_per_token(shape, context_tokens, batch_size)
    if kind == "cpu":
        # A projection's weights in fp32, while prefill runs in it.
        workspace += 4 * (shape.hidden_size or 0) * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
    workspace += _copies(shape, dtype, context_tokens, batch_size, cache // max(1, spec.num_layers), storage)
    return Need(weights, cache, workspace)


def _copies(
    shape: AttentionShape, dtype: Dtype, context_tokens: int, batch_size: int, layer_bytes: int, storage: Storage
) -> int:
    """What one layer's cache is copied to at a time: gathered from blocks, widened from 8 bits, repeated, rebuilt,
    grown; or, without a cache, K and V of the whole prefix."""
    every_head = (
        context_tokens * batch_size * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim) * dtype.block_bytes
    )
    if storage.kind == "none":
        # K, V and queries, and the hidden states of the prefix, in and out.
        return 3 * every_head + 4 * context_tokens * batch_size * (shape.hidden_size or 0) * dtype.block_bytes
    if storage.backend == "repeat-kv" or (shape.is_latent and storage.mla == "expanded"):
        return 2 * every_head
    # fp32 on the way from 8 bits.
    return 0 if storage.is_plain else layer_bytes * (2 if storage.kv_dtype is None else 8)


def _widest(spec: ModelSpec) -> AttentionShape:
    """The model's attention with the most heads and the widest ones any of its layers has."""
    shapes = [part.shape for part in parts_of(spec) if isinstance(part.shape, AttentionShape)]
    return spec.attention._replace(
        num_heads=max((s.num_heads for s in shapes), default=1),
        qk_head_dim=max((s.qk_head_dim for s in shapes), default=_state_width(parts_of(spec))),
        v_head_dim=max((s.v_head_dim for s in shapes), default=_state_width(parts_of(spec))),
    )


def _state_width(parts: list[Part]) -> int:
    return max((part.shape.channels for part in parts if not isinstance(part.shape, AttentionShape)), default=0)


def chunk_tokens(shape: AttentionShape, context_tokens: int, batch_size: int, kind: str) -> int:
    """Prompt tokens of each sequence run at once: a power of two, as many as workspace and Ctrl-C allow."""
    most = _WORKSPACE_BYTES // _workspace_per_token(shape, context_tokens, batch_size)
    if kind == "cpu":
        width = shape.hidden_size or 1
        projection = 2 * width * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
        per_key = 4 * shape.num_heads * (shape.kv_lora_rank + shape.qk_rope_head_dim or shape.qk_head_dim)
        most = min(most, int(_CPU_FLOP / (batch_size * max(projection, per_key * context_tokens, 1))))
    most = max(1, min(most, _MAX_CHUNK_TOKENS))
    return int(1 << (most.bit_length() - 1))


def usable_bytes(free: int, kind: str) -> int:
    """What a run on a device of `kind` may take of `free` bytes."""
    return free * _USABLE_PERCENT[kind] // 100


def layers_that_fit(
    spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int, kind: str, free: int,
    storage: Storage = Storage(),
) -> int:  # fmt: skip
    """How many of the model's first layers can be run within `free` bytes: all of them, fewer, or none."""
    usable = usable_bytes(free, kind)

    def needed(layers: int) -> int:
        return need_of(spec.head(layers), dtype, context_tokens, batch_size, kind, storage).total_bytes

    if needed(spec.num_layers) <= usable:
        return spec.num_layers
    # A model may begin with layers that keep nothing, of which there is nothing to run.
    first = next(n for n in range(1, spec.num_layers + 1) if any(group.caches for group in spec.head(n).layers))
    if needed(first) > usable:
        return 0
    return most_that_fit(lambda n: needed(max(n, first)), usable, spec.num_layers)


def check_fits(
    spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int, steps: int, kind: str, free: int,
    storage: Storage = Storage(),
) -> None:  # fmt: skip
    """Raise DoesNotFitError (exit 4) where the run needs more than the `free` bytes: the number, and what would fit."""
    weights = weights_bytes_of(spec, dtype)
    need = need_of(spec, dtype, context_tokens, batch_size, kind, storage, weights)
    usable = usable_bytes(free, kind)
    if need.total_bytes <= usable:
        return
    longest = longest_context(
        lambda t: need_of(spec, dtype, max(t, 1), batch_size, kind, storage, weights).total_bytes, usable
    )
    fewer = layers_that_fit(spec, dtype, context_tokens, batch_size, kind, free, storage)
    hint = f"the largest context that fits is {longest:,} tokens" if longest and longest > steps else "no context fits"
    if fewer:
        hint += f"; at the one asked for, fewer layers do: --layers {fewer}"
    raise DoesNotFitError(
        f"{spec.name} as {spec.attention.kind} needs {format_size(need.total_bytes)} (weights "
        f"{format_size(need.weights_bytes)}, cache {format_size(need.kv_cache_bytes)}, workspace "
        f"{format_size(need.workspace_bytes)}); {format_size(free, capacity=True)} are free and a run may take "
        f"{_USABLE_PERCENT[kind]}% of it",
        hint,
    )


def _workspace_per_token(shape: AttentionShape, context_tokens: int, batch_size: int) -> int:
    """Bytes of temporaries one prompt token of each sequence takes, generously: fp32 scores and weights of every head
    over the whole context (kernels without a fused path make both), the mask in two forms, and the projections."""
    scores = batch_size * shape.num_heads * context_tokens * 2 * 4
    mask = shape.num_heads * context_tokens * (1 + 4)
    widths = (shape.hidden_size or 0) + shape.num_heads * (shape.kv_lora_rank + shape.qk_head_dim + shape.v_head_dim)
    return scores + mask + batch_size * widths * 4 * 4
