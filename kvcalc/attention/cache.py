"""Preallocated caches, written in place: no copy, no growth, and bytes that can be counted.

A cache with a window is a ring: token p lies in slot p % window and replaces token p - window. With a `stored_dtype` of
8 bits every row (one token, one head) is kept divided by its own scale, an fp32 number beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class TokenCache:
    """Tensors with a row per cached token, for all sequences of a batch, in one layer.

    `shapes` are (heads, width) of each tensor: K and V, or the one latent of MLA. Every tensor is
    (batch, heads, capacity, width), and capacity is `max_tokens`, or `window` where that is less. `stored_dtype`
    (int8, float8_e4m3fn) quantizes what is kept; `scales` are then (batch, heads, capacity, 1) of each tensor.
    """

    layout = "dense"

    def __init__(
        self,
        batch_size: int,
        shapes: tuple[tuple[int, int], ...],
        max_tokens: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype, self.stored_dtype = dtype, stored_dtype
        self.capacity = max_tokens if window is None else min(window, max_tokens)
        self.max_tokens = max_tokens
        self.length = 0
        """Tokens seen; the last min(length, capacity) of them are held."""
        kept = stored_dtype or dtype
        self.tensors = tuple(self._allocate(batch_size, heads, width, kept, device) for heads, width in shapes)
        self.scales = tuple(
            self._allocate(batch_size, heads, 1, torch.float32, device) for heads, _ in shapes if stored_dtype
        )

    def _allocate(self, batch_size: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, heads, self.capacity, width, dtype=dtype, device=device)

    @property
    def held(self) -> int:
        """Tokens that can be attended to now."""
        return min(self.length, self.capacity)

    def views(self) -> tuple[Tensor, ...]:
        """The held rows of each tensor, (batch, heads, held, width), not copied; a full ring's are in slot order.

        A quantized cache's rows are a copy, in the dtype that attention computes in.
        """
        rows = tuple(self._read(tensor) for tensor in self.tensors)
        if not self.scales:
            return rows
        return tuple((row.float() * self._read(scale)).to(self.dtype) for row, scale in zip(rows, self.scales))

    def in_order(self) -> tuple[Tensor, ...]:
        """The held rows, oldest first; a copy where the ring has turned."""
        start = self.length % self.capacity if self.length > self.capacity else 0
        return tuple(torch.cat((v[:, :, start:], v[:, :, :start]), dim=2) if start else v for v in self.views())

    def _read(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, : self.held]

    def _write(self, tensor: Tensor, first: int, last: int, rows: Tensor) -> None:
        tensor[:, :, first:last] = rows

    def append(self, rows: tuple[Tensor, ...]) -> None:
        """Write the next tokens' rows, one tensor (batch, heads, tokens, width) per cache tensor, in place.

        Of more tokens than the ring holds, the last are kept. Raises ValueError beyond max_tokens.
        """
        tokens = rows[0].shape[2]
        if self.length + tokens > self.max_tokens:
            raise ValueError(f"{self.length} + {tokens} tokens do not fit a cache of {self.max_tokens}")
        kept = min(tokens, self.capacity)
        first = (self.length + tokens - kept) % self.capacity
        before_end = min(kept, self.capacity - first)
        for tensor, new in self._pieces(tuple(row[:, :, tokens - kept :] for row in rows)):
            self._write(tensor, first, first + before_end, new[:, :, :before_end])
            if before_end < kept:
                self._write(tensor, 0, kept - before_end, new[:, :, before_end:])
        self.length += tokens

    def _pieces(self, rows: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        """Every tensor of the cache with the rows that go into it: quantized, and their scales, where it is 8-bit."""
        if self.stored_dtype is None:
            return list(zip(self.tensors, rows))
        pairs = [quantize(row, self.stored_dtype) for row in rows]
        return [*zip(self.tensors, (q for q, _ in pairs)), *zip(self.scales, (scale for _, scale in pairs))]

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on, so that the same positions can be written again.

        In a ring that has turned, only one token's slot may have been overwritten since: rewinding further would
        bring back rows which are gone. Raises ValueError then.
        """
        if length > self.length or (self.length > self.capacity and self.length - length > 1):
            raise ValueError(f"cannot rewind from {self.length} to {length} tokens")
        self.length = length


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rows` (..., width) in an 8-bit `dtype`, and the fp32 scale (..., 1) of each, which maps its largest element to
    the largest number of the type: 127 of int8, 448 of float8_e4m3fn."""
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = rows.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / most
    scaled = (rows.float() / scale).clamp(-most, most)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def held_bytes(caches: Iterable[Any]) -> int:
    """Bytes of the storage behind the caches' tensors, scales included; storage that tensors share counts once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for storage in (tensor.untyped_storage() for tensor in (*cache.tensors, *cache.scales))
    }
    return sum(storages.values())
