"""What a decode backend is: one way to run attention of single tokens over a cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvcalc.attention.core import attention_with_weights


class Case(NamedTuple):
    """What a backend is asked to run: device, element types, head geometry and how the cache lies in memory.

    `stored_dtype` is None where the cache keeps `dtype` itself; `block_size` is None where it is no paged one.
    `is_latent`: K and V are one tensor, V the first `v_width` of its elements.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    k_width: int
    v_width: int
    layout: str = "dense"
    stored_dtype: torch.dtype | None = None
    block_size: int | None = None
    is_latent: bool = False


class Cache(Protocol):
    """What of a cache a backend may read: see `kvcalc.attention.cache.TokenCache` and its kinds."""

    layout: str
    tensors: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]

    @property
    def held(self) -> int: ...

    def views(self) -> tuple[Tensor, ...]: ...


class Backend:
    """Attention of one query per head and sequence over what a cache holds.

    `name` is what `--backend` takes. `is_candidate` False keeps it from being chosen: it is there to be compared with.
    """

    name: str
    is_candidate = True

    def why_not(self, case: Case) -> str | None:
        """Why this backend cannot run `case` here; None where it can."""
        return None

    def why_not_unasked(self, case: Case) -> str | None:
        """Why it is not even tried unless asked for by name; None where it is."""
        return None if self.is_candidate else "a baseline, run only by name"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """The same over plain tensors: `query` (B, H, 1, d), `key` (B, G, s, d), `value` (B, G, s, e)."""
        return attention_with_weights(query, key, value, scale=scale)[0]

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        """`query` (batch, heads, 1, width) over all rows `cache` holds; returns (batch, heads, 1, V's width).

        `v_width`: the cache is one tensor, and V the first so many elements of its rows (MLA). `scale` replaces
        1 / sqrt(width).
        """
        key, value = keys_and_values(cache, v_width)
        return self(query, key, value, scale)


def keys_and_values(cache: Cache, v_width: int | None) -> tuple[Tensor, Tensor]:
    """The held rows of K and V; of a latent its front as V."""
    if v_width is None:
        key, value = cache.views()
        return key, value
    (latent,) = cache.views()
    return latent, latent[..., :v_width]


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def needs_half_on_cuda(case: Case) -> str | None:
    """The reason of a kernel that runs on CUDA devices, in 16 bits, over caches in those 16 bits."""
    if case.device.type != "cuda":
        return "runs on CUDA devices"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in 16 bits, not {dtype_name(case.dtype)}"
    if case.stored_dtype is not None:
        return f"reads no {dtype_name(case.stored_dtype)} cache with a scale per row"
    if case.layout == "growing":
        return "reads preallocated caches"
    return None
