"""What a run will need, computed before anything is allocated; and how large its prefill chunks may be."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import DoesNotFitError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import longest_context, most_that_fit, stored_bytes
from kvcalc.model.spec import AttentionShape, ModelSpec
from kvcalc.model.variants import attention_parameters
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


def need_of(spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int, kind: str) -> Need:
    """What measuring `spec` takes on a device of `kind`."""
    shape = spec.attention
    weights = (attention_parameters(shape) or 0) * spec.num_layers * dtype.block_bytes
    cache = stored_bytes(spec, dtype, context_tokens, batch_size)
    chunk = chunk_tokens(shape, context_tokens, batch_size, kind)
    workspace = _OVERHEAD_BYTES + chunk * _workspace_per_token(shape, context_tokens, batch_size)
    if kind == "cpu":
        # A projection's weights in fp32, while prefill runs in it.
        workspace += 4 * (shape.hidden_size or 0) * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
    return Need(weights, cache, workspace)


def chunk_tokens(shape: AttentionShape, context_tokens: int, batch_size: int, kind: str) -> int:
    """Prompt tokens of each sequence run at once: a power of two, as many as workspace and Ctrl-C allow."""
    most = _WORKSPACE_BYTES // _workspace_per_token(shape, context_tokens, batch_size)
    if kind == "cpu":
        width = shape.hidden_size or 1
        projection = 2 * width * shape.num_heads * max(shape.qk_head_dim, shape.v_head_dim)
        per_key = 4 * shape.num_heads * (shape.kv_lora_rank + shape.qk_rope_head_dim or shape.qk_head_dim)
        most = min(most, int(_CPU_FLOP / (batch_size * max(projection, per_key * context_tokens))))
    most = max(1, min(most, _MAX_CHUNK_TOKENS))
    return int(1 << (most.bit_length() - 1))


def check_fits(
    spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int, steps: int, kind: str, free: int
) -> None:
    """Raise DoesNotFitError (exit 4) where the run needs more than the `free` bytes: the number, and what would fit."""
    need = need_of(spec, dtype, context_tokens, batch_size, kind)
    usable = free * _USABLE_PERCENT[kind] // 100
    if need.total_bytes <= usable:
        return
    longest = longest_context(lambda t: need_of(spec, dtype, max(t, 1), batch_size, kind).total_bytes, usable)
    fewer = most_that_fit(
        lambda n: need_of(spec.head(n), dtype, context_tokens, batch_size, kind).total_bytes, usable, spec.num_layers
    )
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
