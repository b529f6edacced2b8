"""The interface of decode backends, which run attention of single tokens over a cache, and the plain PyTorch backends.

The PyTorch backends treat the query heads of a group as query rows of their one KV head, either fused or in plain
matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcalc.attention.core import eager_attention, grouped_attention, repeat_heads
from kvcalc.records import NamedTuple


class Case(NamedTuple):
    """The case that a backend runs: device, element types, head sizes and the memory layout of the cache.

    `stored_dtype` is None if the cache stores `dtype` itself. With `is_latent`, K and V are one tensor, and V is the
    first `v_width` elements of each row. With `is_ragged`, the sequences have different lengths.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    k_width: int
    v_width: int
    layout: str = "dense"
    stored_dtype: torch.dtype | None = None
    is_latent: bool = False
    is_ragged: bool = False


class Cache(Protocol):
    """The part of a cache that a backend may read. See `kvcalc.attention.cache.TokenCache` and its subclasses."""

    layout: str
    is_ragged: bool
    scaling: str
    table: Tensor | None
    tensors: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    starts: tuple[int, ...]

    @property
    def held(self) -> int: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def each(self) -> Sequence[Cache]: ...

    def views(self) -> tuple[Tensor, ...]: ...


class Backend:
    """Attention of one query per head and sequence over a cache.

    `name` is the name that `--backend` takes. A backend with `is_candidate` False is never chosen automatically. It is
    a baseline for comparison.
    """

    name: str
    is_candidate = True
    reads_stored_rows = False
    """Whether it reads 8-bit rows and rows in blocks where they are, and copies nothing."""
    takes_lengths = False
    """Whether one call runs sequences of different lengths. Otherwise there is a call for each sequence."""
    compiles_each_shape = False
    """Whether another batch or capacity of the cache costs seconds of compiling."""
    failure: str | None = None
    """Why it does not work on this machine, for which it is made. Known after `why_not`."""

    def why_not(self, case: Case) -> str | None:
        """The reason why this backend cannot run `case` on this machine, or None if it can."""
        return None

    def why_not_unasked(self, case: Case) -> str | None:
        """The reason why this backend runs only if requested by name, or None if it is tried automatically."""
        return None if self.is_candidate else "a baseline, run only by name"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Like `decode`, but over plain tensors: `query` (B, H, 1, d), `key` (B, G, s, d), `value` (B, G, s, e)."""
        return eager_attention(query, key, value, scale=scale)

    def attend(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        """Like `decode`, but also over a cache whose sequences have different lengths."""
        if not cache.is_ragged or self.takes_lengths:
            return self.decode(query, cache, scale, v_width)
        each = enumerate(cache.each())
        return torch.cat([self.decode(query[n : n + 1], one, scale, v_width) for n, one in each])

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        """Attend from `query` (batch, heads, 1, width) to all rows in `cache`. Returns (batch, heads, 1, V's width).

        If `v_width` is given, the cache is one tensor, and V is the first `v_width` elements of its rows (MLA). `scale`
        replaces 1 / sqrt(width).
        """
        if v_width is None:
            key, value = cache.views()
            return self(query, key, value, scale)
        (latent,) = cache.views()
        return self(query, latent, latent[..., :v_width], scale)


class GroupedMatmul(Backend):
    """Two batched matrix products with a softmax in fp32 between them. Faster for one query on some devices."""

    name = "grouped-matmul"


class RepeatKv(Backend):
    """K and V are copied for every query head before attention. A baseline, because grouping avoids exactly this."""

    name = "repeat-kv"
    is_candidate = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return grouped_attention(query, *repeat_heads(query, key, value), scale=scale)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`, for example `bfloat16`."""
    return str(dtype).removeprefix("torch.")
