"""What a run will need, computed before anything is allocated; and how large its prefill chunks may be."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import DoesNotFitError
from kvcalc.measure.parts import parts_of
from kvcalc.measure.stack import Request
from kvcalc.memory import kv_cache
from kvcalc.memory.dtypes import Dtype, bytes_of
from kvcalc.memory.kv_cache import longest_context, most_that_fit
from kvcalc.model.caches import HEADS_CACHES, Cache, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
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

# A quantized row (one token, one head) has a scale in fp32.
_SCALE_BYTES = 4


class Need(NamedTuple):
    """Bytes a run needs: attention weights, cache, temporaries."""

    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes


@remembered
def weights_bytes_of(spec: ModelSpec, dtype: Dtype) -> int:
    """The projections of every part that is run; biases, norms and convolutions not counted."""
    hidden = spec.attention.hidden_size or 0
    return sum(part.parameters(hidden) for part in parts_of(spec)) * dtype.block_bytes


def predicted_bytes(spec: ModelSpec, request: Request) -> int:
    """Bytes the caches must hold: the formula's, blocks rounded up and scales added. Nothing may come from a tensor."""
    if request.storage.kind == "none":
        return 0
    if request.storage.is_plain:
        return kv_cache.stored_bytes(spec, request.dtype, request.context_tokens, request.batch_size)
    return _kept_bytes(spec, request, request.storage.block_size or 1)


def read_bytes(spec: ModelSpec, request: Request) -> int:
    """Bytes of cache one decode step reads: every held row, and its scales; no more of a block than is held."""
    if request.storage.kv_dtype is None:
        return kv_cache.decode_read_bytes(spec, request.dtype, request.context_tokens, request.batch_size)
    return _kept_bytes(spec, request, 1)


def _kept_bytes(spec: ModelSpec, request: Request, block_size: int) -> int:
    """Bytes of rows in blocks of `block_size`. States and an encoder's K and V have no blocks and no other type."""
    storage = request.storage

    def count(cache: Cache, tokens: int, dtype: Dtype) -> int:
        if isinstance(cache, (RecurrentState, CrossAttention)):
            return kv_cache.stored_cache_bytes(cache, tokens, dtype)
        rows = -(-min(tokens, cache.window or tokens) // block_size) * block_size
        scaled = 2 * cache.num_kv_heads if isinstance(cache, HEADS_CACHES) else 1
        scales = rows * scaled * _SCALE_BYTES if storage.kv_dtype else 0
        return bytes_of(rows * sum(cache.token_rows()), storage.dtype(dtype)) + scales

    return request.batch_size * kv_cache.sequence_bytes(spec, request.dtype, request.context_tokens, count)


def need_of(spec: ModelSpec, request: Request) -> Need:
    """What measuring `spec` takes on the request's device."""
    shape = _widest(spec)
    cache = predicted_bytes(spec, request)
    workspace = _OVERHEAD_BYTES + chunk_tokens(shape, request) * _workspace_per_token(shape, request)
    if request.device.type == "cpu":
        # A projection's weights in fp32, while prefill runs in it.
        workspace += 4 * (shape.hidden_size or 0) * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
    workspace += _copies(shape, request, cache // max(1, spec.num_layers))
    return Need(weights_bytes_of(spec, request.dtype), cache, workspace)


def _copies(shape: AttentionShape, request: Request, layer_bytes: int) -> int:
    """What one layer's cache is copied to at a time: gathered from blocks, widened from 8 bits, repeated, rebuilt,
    grown; or, without a cache, K and V of the whole prefix."""
    storage, rows = request.storage, request.context_tokens * request.batch_size * request.dtype.block_bytes
    every_head = rows * shape.num_heads * (shape.qk_head_dim + shape.v_head_dim)
    if storage.kind == "none":
        # K, V and queries, and the hidden states of the prefix, in and out.
        return 3 * every_head + 4 * rows * (shape.hidden_size or 0)
    if storage.backend == "repeat-kv" or (shape.is_latent and storage.mla == "expanded"):
        return 2 * every_head
    # fp32 on the way from 8 bits.
    return 0 if storage.is_plain else layer_bytes * (2 if storage.kv_dtype is None else 8)


def _widest(spec: ModelSpec) -> AttentionShape:
    """The model's attention with the most heads and the widest ones any of its layers has."""
    shapes = [part.shape for part in parts_of(spec)]
    attention = [shape for shape in shapes if isinstance(shape, AttentionShape)]
    state = max((shape.channels for shape in shapes if not isinstance(shape, AttentionShape)), default=0)
    return spec.attention._replace(
        num_heads=max((s.num_heads for s in attention), default=1),
        qk_head_dim=max((s.qk_head_dim for s in attention), default=state),
        v_head_dim=max((s.v_head_dim for s in attention), default=state),
    )


def chunk_tokens(shape: AttentionShape, request: Request) -> int:
    """Prompt tokens of each sequence run at once: a power of two, as many as workspace and Ctrl-C allow."""
    most = _WORKSPACE_BYTES // _workspace_per_token(shape, request)
    if request.device.type == "cpu":
        projection = 2 * (shape.hidden_size or 1) * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
        per_key = 4 * shape.num_heads * (shape.kv_lora_rank + shape.qk_rope_head_dim or shape.qk_head_dim)
        flop = request.batch_size * max(projection, per_key * request.context_tokens, 1)
        most = min(most, int(_CPU_FLOP / flop))
    most = max(1, min(most, _MAX_CHUNK_TOKENS))
    return int(1 << (most.bit_length() - 1))


def usable_bytes(free: int, kind: str) -> int:
    """What a run on a device of `kind` may take of `free` bytes."""
    return free * _USABLE_PERCENT[kind] // 100


def layers_that_fit(spec: ModelSpec, request: Request, free: int) -> int:
    """How many of the model's first layers can be run within `free` bytes: all of them, fewer, or none."""
    usable = usable_bytes(free, request.device.type)

    def needed(layers: int) -> int:
        return need_of(spec.head(layers), request).total_bytes

    if needed(spec.num_layers) <= usable:
        return spec.num_layers
    # A model may begin with layers that keep nothing, of which there is nothing to run.
    first = next(n for n in range(1, spec.num_layers + 1) if any(group.caches for group in spec.head(n).layers))
    if needed(first) > usable:
        return 0
    return most_that_fit(lambda n: needed(max(n, first)), usable, spec.num_layers)


def check_fits(spec: ModelSpec, request: Request, free: int) -> None:
    """Raise DoesNotFitError (exit 4) where the run needs more than the `free` bytes: the number, and what would fit."""
    kind, need = request.device.type, need_of(spec, request)
    usable = usable_bytes(free, kind)
    if need.total_bytes <= usable:
        return
    longest = longest_context(
        lambda tokens: need_of(spec, request._replace(context_tokens=max(tokens, 1))).total_bytes, usable
    )
    fewer = layers_that_fit(spec, request, free)
    fits = longest and longest > request.steps
    hint = f"the largest context that fits is {longest:,} tokens" if fits else "no context fits"
    if fewer:
        hint += f"; at the one asked for, fewer layers do: --layers {fewer}"
    raise DoesNotFitError(
        f"{spec.name} as {spec.attention.kind} needs {format_size(need.total_bytes)} (weights "
        f"{format_size(need.weights_bytes)}, cache {format_size(need.kv_cache_bytes)}, workspace "
        f"{format_size(need.workspace_bytes)}); {format_size(free, capacity=True)} are free and a run may take "
        f"{_USABLE_PERCENT[kind]}% of it",
        hint,
    )


def _workspace_per_token(shape: AttentionShape, request: Request) -> int:
    """Bytes of temporaries one prompt token of each sequence takes, generously: fp32 scores and weights of every head
    over the whole context (kernels without a fused path make both), the mask in two forms, and the projections."""
    scores = request.batch_size * shape.num_heads * request.context_tokens * 2 * 4
    mask = shape.num_heads * request.context_tokens * (1 + 4)
    widths = (shape.hidden_size or 0) + shape.num_heads * (shape.kv_lora_rank + shape.qk_head_dim + shape.v_head_dim)
    return scores + mask + request.batch_size * widths * 4 * 4
