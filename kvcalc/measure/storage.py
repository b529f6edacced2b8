"""How a run keeps its cache: preallocated, in blocks, grown, in 8 bits, or not at all; and the bytes each predicts.

The bytes come from the formula: nothing here may come from a tensor.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.memory import kv_cache
from kvcalc.memory.dtypes import DTYPES, Dtype
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.spec import ModelSpec

KINDS = ("preallocated", "grow", "none")
MLA_FORMS = ("absorbed", "expanded")
QUANTIZED = ("fp8", "int8")

# A quantized row (one token, one head) has a scale in fp32.
_SCALE_BYTES = 4


class Storage(NamedTuple):
    """`kind` of KINDS; `block_size` tokens where it is paged; `kv_dtype` of QUANTIZED, or None: the model's own."""

    kind: str = "preallocated"
    block_size: int | None = None
    kv_dtype: str | None = None
    mla: str = "absorbed"
    backend: str = "auto"

    @property
    def is_plain(self) -> bool:
        return self.kind == "preallocated" and self.block_size is None and self.kv_dtype is None

    def dtype(self, dtype: Dtype) -> Dtype:
        """What the rows are kept in, where the model computes in `dtype`."""
        return DTYPES[self.kv_dtype] if self.kv_dtype else dtype


def predicted_bytes(spec: ModelSpec, dtype: Dtype, tokens: int, batch: int, storage: Storage = Storage()) -> int:
    """Bytes the caches of `batch` sequences must hold: the formula's, blocks rounded up and scales added."""
    if storage.is_plain or storage.kind == "none":
        return 0 if storage.kind == "none" else kv_cache.stored_bytes(spec, dtype, tokens, batch)
    return batch * _sum(spec, dtype, tokens, storage, storage.block_size or 1)


def read_bytes(spec: ModelSpec, dtype: Dtype, tokens: int, batch: int, storage: Storage = Storage()) -> int:
    """Bytes of cache one decode step reads: every held row, and its scales; no more of a block than is held."""
    if storage.kv_dtype is None:
        return kv_cache.decode_read_bytes(spec, dtype, tokens, batch)
    return batch * _sum(spec, dtype, tokens, storage, 1)


def _sum(spec: ModelSpec, dtype: Dtype, tokens: int, storage: Storage, block_size: int) -> int:
    return sum(
        group.num_layers * _cache_bytes(cache, dtype, tokens, storage, block_size)
        for group in spec.layers
        for cache in group.caches
    )


def _cache_bytes(cache: Cache, dtype: Dtype, tokens: int, storage: Storage, block_size: int) -> int:
    """One sequence's bytes in one layer's cache. States and an encoder's K and V have no blocks and no other type."""
    if isinstance(cache, (RecurrentState, CrossAttention)):
        return kv_cache.stored_cache_bytes(cache, tokens, dtype)
    kept = tokens if cache.window is None else min(tokens, cache.window)
    rows = -(-kept // block_size) * block_size
    scales = 0
    if storage.kv_dtype:
        scales = rows * _SCALE_BYTES * (2 * cache.num_kv_heads if isinstance(cache, HEADS_CACHES) else 1)
    return kv_cache.stored_cache_bytes(_whole(cache), rows, storage.dtype(dtype)) + scales


def _whole(cache: Cache) -> Cache:
    """The same rows without a window: as many as are asked for."""
    if isinstance(cache, (SlidingWindowAttention, ChunkedAttention)):
        return FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
    return cache._replace(window=None) if isinstance(cache, LatentAttention) else cache
