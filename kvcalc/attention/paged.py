"""A cache in blocks, as serving engines keep it: one pool for all sequences, read through a block table.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache


class PagedCache(TokenCache):
    """As `TokenCache`, but every tensor is a pool (blocks, block_size, heads, width), and `table` (batch, blocks of a
    sequence), int32, says which block holds which tokens.

    Every sequence has blocks for its whole capacity, its last one perhaps half empty. The blocks lie in a random order,
    as they do in a server after a while, the same for the same `seed`.
    """

    layout = "paged"

    def __init__(
        self,
        batch_size: int,
        shapes: tuple[tuple[int, int], ...],
        max_tokens: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
        stored_dtype: torch.dtype | None = None,
        *,
        block_size: int,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        super().__init__(batch_size, shapes, max_tokens, window, dtype, device, stored_dtype)
        order = torch.randperm(batch_size * self.num_blocks, generator=torch.Generator().manual_seed(seed))
        self.table = order.view(batch_size, self.num_blocks).to(device, torch.int32)
        # Made once: a step may be captured into a graph, which copies nothing from the host.
        self._slots = torch.arange(self.capacity, device=device)
        self._blocks = self.table.long()

    @property
    def num_blocks(self) -> int:
        """Blocks of one sequence."""
        return -(-self.capacity // self.block_size)

    def _allocate(self, batch_size: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(batch_size * self.num_blocks, self.block_size, heads, width, dtype=dtype, device=device)

    def _read(self, tensor: Tensor) -> Tensor:
        """The held rows, gathered through the table: a copy."""
        used = -(-self.held // self.block_size)
        blocks = _as_bytes(tensor)[self._blocks[:, :used]].view(tensor.dtype)
        return blocks.flatten(1, 2)[:, : self.held].transpose(1, 2)

    def _write(self, tensor: Tensor, first: int, last: int, rows: Tensor) -> None:
        slots = self._slots[first:last]
        blocks = self._blocks[:, slots // self.block_size]
        new = rows.transpose(1, 2).contiguous()
        _as_bytes(tensor)[blocks, slots % self.block_size] = _as_bytes(new)


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view that can be indexed: torch does not index 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
