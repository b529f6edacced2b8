"""Preallocated caches, written in place: no copy, no growth, and bytes that can be counted.

A cache with a window is a ring: token p lies in slot p % window and replaces token p - window.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class TokenCache:
    """Tensors with a row per cached token, for all sequences of a batch, in one layer.

    `shapes` are (heads, width) of each tensor: K and V, or the one latent of MLA. Every tensor is
    (batch, heads, capacity, width), and capacity is `max_tokens`, or `window` where that is less.
    """

    def __init__(
        self,
        batch_size: int,
        shapes: tuple[tuple[int, int], ...],
        max_tokens: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = max_tokens if window is None else min(window, max_tokens)
        self.max_tokens = max_tokens
        self.length = 0
        """Tokens seen; the last min(length, capacity) of them are held."""
        self.tensors = tuple(self._allocate(batch_size, heads, width, dtype, device) for heads, width in shapes)

    def _allocate(self, batch_size: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, heads, self.capacity, width, dtype=dtype, device=device)

    @property
    def held(self) -> int:
        """Tokens that can be attended to now."""
        return min(self.length, self.capacity)

    def views(self) -> tuple[Tensor, ...]:
        """The held rows of each tensor, (batch, heads, held, width), not copied; a full ring's are in slot order."""
        return tuple(tensor[:, :, : self.held] for tensor in self.tensors)

    def in_order(self) -> tuple[Tensor, ...]:
        """The held rows, oldest first; a copy where the ring has turned."""
        start = self.length % self.capacity if self.length > self.capacity else 0
        return tuple(torch.cat((v[:, :, start:], v[:, :, :start]), dim=2) if start else v for v in self.views())

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
        for tensor, new in zip(self.tensors, rows):
            new = new[:, :, tokens - kept :]
            tensor[:, :, first : first + before_end] = new[:, :, :before_end]
            tensor[:, :, : kept - before_end] = new[:, :, before_end:]
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` on, so that the same positions can be written again.

        In a ring that has turned, only one token's slot may have been overwritten since: rewinding further would
        bring back rows which are gone. Raises ValueError then.
        """
        if length > self.length or (self.length > self.capacity and self.length - length > 1):
            raise ValueError(f"cannot rewind from {self.length} to {length} tokens")
        self.length = length


def held_bytes(caches: Iterable[TokenCache]) -> int:
    """Bytes of the storage behind the caches' tensors; storage that tensors share counts once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for cache in caches
        for storage in (tensor.untyped_storage() for tensor in cache.tensors)
    }
    return sum(storages.values())
