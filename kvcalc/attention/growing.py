"""A cache that grows by concatenation, as naive code has it: every step copies all that is held. A baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache


class GrowingCache(TokenCache):
    """As `TokenCache`, but each `append` makes new tensors of the old rows and the new ones.

    They are as long as the tokens held, so the bytes held are the same at the end; while one is made, two exist.
    """

    layout = "growing"

    def _allocate(self, batch_size: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, heads, 0, width, dtype=dtype, device=device)

    def append(self, rows: tuple[Tensor, ...]) -> None:
        """Copy the held rows and the new ones into new tensors; of a window's, the last."""
        tokens = rows[0].shape[2]
        if self.length + tokens > self.max_tokens:
            raise ValueError(f"{self.length} + {tokens} tokens do not fit a cache of {self.max_tokens}")
        pieces = self._pieces(rows)
        # After a rewind more rows are there than are held: those are the forgotten ones.
        grown = [torch.cat((old[:, :, : self.held], new), dim=2)[:, :, -self.capacity :] for old, new in pieces]
        # A cut view would keep the storage of the whole.
        grown = [tensor.contiguous() for tensor in grown]
        self.tensors, self.scales = tuple(grown[: len(self.tensors)]), tuple(grown[len(self.tensors) :])
        self.length += tokens

    def in_order(self) -> tuple[Tensor, ...]:
        """The held rows, oldest first: they always lie so."""
        return self.views()

    def rewind(self, length: int) -> None:
        """As `TokenCache.rewind`. A window's oldest row is gone for good: the first row stands in for it."""
        full = self.length > self.capacity
        super().rewind(length)
        if full:
            self.tensors, self.scales = (
                tuple(torch.cat((t[:, :, :1], t[:, :, :-1]), dim=2) for t in kept)
                for kept in (self.tensors, self.scales)
            )
