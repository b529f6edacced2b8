"""Caches whose bytes can be counted: preallocated and written in place, paged, or grown by concatenation.

A cache with a window is a ring: token p is in slot p % window and replaces token p - window. With an 8-bit
`stored_dtype`, rows are divided by a scale, which is stored as an fp32 number: every row (one token, one head) by its
own, or all rows of a head, or of the tensor, by one that does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class TokenCache:
    """Tensors with one row per cached token, for all sequences of a batch in one layer.

    `shapes` has (heads, width) of each tensor: K and V, or the single latent of MLA. Every tensor has the shape
    (batch, heads, capacity, width). The capacity is `max_tokens`, or `window` if that is less. `stored_dtype` (int8,
    float8_e4m3fn) quantizes the stored rows. Each tensor then has `scales` of shape (batch, heads, capacity, 1). If
    `scaling` is not `row`, they are views of one number for each head, or of one in all.
    """

    layout = "dense"
    is_ragged = False
    """Whether the sequences have different lengths: see `kvcalc.attention.ragged`."""
    block_size: int | None = None
    table: Tensor | None = None
    behind: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    def __init__(
        self, batch_size: int, shapes: tuple[tuple[int, int], ...], max_tokens: int, window: int | None,
        dtype: torch.dtype, device: torch.device, stored_dtype: torch.dtype | None = None, scaling: str = "row",
    ) -> None:  # fmt: skip
        self.scaling = scaling
        self.batch_size, self.dtype, self.stored_dtype = batch_size, dtype, stored_dtype
        self.capacity = max_tokens if window is None else min(window, max_tokens)
        self.max_tokens = max_tokens
        self.length = 0
        """The number of tokens seen. The cache holds the last min(length, capacity) of them."""

        def allocate(heads: int, width: int, kept: torch.dtype) -> Tensor:
            return torch.zeros(self._shape(batch_size, heads, width), dtype=kept, device=device)

        self.tensors = tuple(allocate(heads, width, stored_dtype or dtype) for heads, width in shapes)
        self.scales: tuple[Tensor, ...] = ()
        self._fixed: tuple[Tensor, ...] = ()
        if stored_dtype is not None and scaling == "row":
            self.scales = tuple(allocate(heads, 1, torch.float32) for heads, _ in shapes)
        elif stored_dtype is not None:
            counts = [heads if scaling == "head" else 1 for heads, _ in shapes]
            self._fixed = tuple(fixed_scales(count, stored_dtype).to(device)[:, None, None] for count in counts)
            # A head's rows have one scale, so that the strides of all dimensions but the heads' are 0.
            at = [1 if size != -1 else -1 for size in self._shape(0, -1, 1)]
            self.scales = tuple(
                fixed.view(at).expand(self._shape(batch_size, heads, 1))
                for fixed, (heads, _) in zip(self._fixed, shapes)
            )

    def _shape(self, batch_size: int, heads: int, width: int) -> tuple[int, ...]:
        """The shape in which one tensor is allocated."""
        return (batch_size, heads, self.capacity, width)

    @property
    def held(self) -> int:
        """The number of tokens in the cache, which can be attended to now."""
        return min(self.length, self.capacity)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in the cache for each sequence."""
        return (self.held,) * self.batch_size

    def each(self) -> list[TokenCache]:
        """Caches whose sequences have one length: this one. If it is ragged, one for each sequence, over its memory."""
        return [self]

    def views(self, slots: slice = slice(None)) -> tuple[Tensor, ...]:
        """Views of the held rows of each tensor, (batch, heads, held, width). A full ring's rows are in slot order.

        `slots` limits them to a part of the held rows. The rows of a quantized cache are a copy, in the dtype that
        attention computes in.
        """
        slots = slice(*slots.indices(self.held))
        rows = tuple(self._read(tensor, slots) for tensor in self.tensors)
        if not self.scales:
            return rows
        scales = (self._read(scale, slots) for scale in self.scales)
        return tuple((row.float() * scale).to(self.dtype) for row, scale in zip(rows, scales))

    def in_order(self) -> tuple[Tensor, ...]:
        """The held rows, oldest first. This is a copy if the ring has wrapped around."""
        start = self.length % self.capacity if self.length > self.capacity else 0
        return tuple(torch.cat((v[:, :, start:], v[:, :, :start]), dim=2) if start else v for v in self.views())

    def append(self, rows: tuple[Tensor, ...]) -> None:
        """Write the rows of the next tokens in place. `rows` has one (batch, heads, tokens, width) per cache tensor.

        If there are more tokens than the ring holds, the last ones are kept. Raises ValueError beyond max_tokens.
        """
        tokens = rows[0].shape[2]
        if self.length + tokens > self.max_tokens:
            raise ValueError(f"{self.length} + {tokens} tokens do not fit a cache of {self.max_tokens}")
        rows = tuple(row[:, :, max(0, tokens - self.capacity) :] for row in rows)
        self._store(self._quantized(rows), tokens)
        self.length += tokens

    def _quantized(self, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`rows` as they are stored: followed by their scales, if these are their own."""
        if self.stored_dtype is None:
            return rows
        if self.scaling != "row":
            return tuple(divided(row, scale, self.stored_dtype) for row, scale in zip(rows, self._fixed))
        quantized, scales = zip(*(quantize(row, self.stored_dtype) for row in rows))
        return (*quantized, *scales)

    def _store(self, rows: tuple[Tensor, ...], tokens: int) -> None:
        """Write `rows`, the last rows (at most `capacity`) of `tokens` new tokens, into each tensor and each scale."""
        kept = rows[0].shape[2]
        first = (self.length + tokens - kept) % self.capacity
        before_end = min(kept, self.capacity - first)
        for tensor, new in zip((*self.tensors, *self.scales), rows):
            self._write(tensor, first, new[:, :, :before_end])
            if before_end < kept:
                self._write(tensor, 0, new[:, :, before_end:])

    def _read(self, tensor: Tensor, slots: slice) -> Tensor:
        return tensor[:, :, slots]

    def _write(self, tensor: Tensor, first: int, rows: Tensor) -> None:
        tensor[:, :, first : first + rows.shape[2]] = rows

    def rewind(self, length: int) -> None:
        """Forget the tokens from `length` onwards, so that the same positions can be written again.

        A ring that has wrapped around can only go back by one token, because the older rows are overwritten. Raises
        ValueError if `length` is further back.
        """
        if length > self.length or (self.length > self.capacity and self.length - length > 1):
            raise ValueError(f"cannot rewind from {self.length} to {length} tokens")
        self.length = length


class GrowingCache(TokenCache):
    """Like `TokenCache`, but each `append` concatenates the old and the new rows into new tensors, as naive code does.

    This is a baseline: every step copies the whole cache. The tensors are as long as the number of held tokens, so the
    bytes at the end are the same. While a tensor is being copied, it exists twice.
    """

    layout = "growing"

    def _shape(self, batch_size: int, heads: int, width: int) -> tuple[int, ...]:
        return (batch_size, heads, 0, width)

    def in_order(self) -> tuple[Tensor, ...]:
        """The held rows, oldest first. They are always in this order."""
        return self.views()

    def _store(self, rows: tuple[Tensor, ...], tokens: int) -> None:
        # After a rewind, the tensors have more rows than the cache holds. The rows at the end are forgotten.
        pieces = [(old[:, :, : self.held], new) for old, new in zip((*self.tensors, *self.scales), rows)]
        # A view would keep the whole storage alive.
        grown = [torch.cat(piece, dim=2)[:, :, -self.capacity :].contiguous() for piece in pieces]
        self.tensors, self.scales = tuple(grown[: len(self.tensors)]), tuple(grown[len(self.tensors) :])

    def rewind(self, length: int) -> None:
        """Like `TokenCache.rewind`. The oldest row of a full window is lost, so a copy of the first row replaces it."""
        full = self.length > self.capacity
        super().rewind(length)
        if full:
            self.tensors, self.scales = (
                tuple(torch.cat((t[:, :, :1], t[:, :, :-1]), dim=2) for t in kept)
                for kept in (self.tensors, self.scales)
            )


class PagedCache(TokenCache):
    """Like `TokenCache`, but every tensor is a pool (blocks, block_size, heads, width), as in serving engines.

    `table` (batch, blocks per sequence), int32, maps a sequence's tokens to blocks. Every sequence has blocks for its
    whole capacity, and its last block may be partly empty. The blocks are in random order, as in a server after some
    time. The same `seed` gives the same order. Source: Kwon et al. 2023, "Efficient Memory Management for Large
    Language Model Serving with PagedAttention".
    """

    layout = "paged"
    block_size: int
    table: Tensor

    def __init__(
        self, batch_size: int, shapes: tuple[tuple[int, int], ...], max_tokens: int, window: int | None,
        dtype: torch.dtype, device: torch.device, stored_dtype: torch.dtype | None = None, scaling: str = "row", *,
        block_size: int, seed: int = 0,
    ) -> None:  # fmt: skip
        self.block_size = block_size
        super().__init__(batch_size, shapes, max_tokens, window, dtype, device, stored_dtype, scaling)
        order = torch.randperm(batch_size * self.num_blocks, generator=torch.Generator().manual_seed(seed))
        self._set_table(order.view(batch_size, self.num_blocks).to(device, torch.int32))

    def _set_table(self, table: Tensor) -> None:
        # Created once, because a step may be captured into a graph, which must not copy from the host.
        self.table, self._blocks = table, table.long()
        self._slots = torch.arange(self.capacity, device=table.device)

    @property
    def num_blocks(self) -> int:
        """The number of blocks per sequence."""
        return -(-self.capacity // self.block_size)

    def _shape(self, batch_size: int, heads: int, width: int) -> tuple[int, ...]:
        return (batch_size * self.num_blocks, self.block_size, heads, width)

    def _read(self, tensor: Tensor, slots: slice) -> Tensor:
        """A copy of rows, gathered with the table."""
        first, last = slots.start // self.block_size, -(-slots.stop // self.block_size)
        blocks = as_bytes(tensor)[self._blocks[:, first:last]].view(tensor.dtype)
        before = first * self.block_size
        return blocks.flatten(1, 2)[:, slots.start - before : slots.stop - before].transpose(1, 2)

    def _write(self, tensor: Tensor, first: int, rows: Tensor) -> None:
        slots = self._slots[first : first + rows.shape[2]]
        blocks = self._blocks[:, slots // self.block_size]
        new = rows.transpose(1, 2).contiguous()
        as_bytes(tensor)[blocks, slots % self.block_size] = as_bytes(new)


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize `rows` (..., width) to an 8-bit `dtype`. Returns the rows and their fp32 scales (..., 1).

    The scale of a row maps its largest element to the largest number of the type: 127 for int8, 448 for float8_e4m3fn.
    """
    # On CUDA, torch divides by a Python number as this product does (BinaryDivTrueKernel.cu), and on a CPU it does not.
    scale = rows.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) * (1.0 / largest_of(dtype))
    return divided(rows, scale, dtype), scale


def divided(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows` divided by `scale`, in an 8-bit `dtype`. Larger numbers become the largest one of the type."""
    most = largest_of(dtype)
    scaled = (rows.float() / scale).clamp(-most, most)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def largest_of(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit type: 127, or 448 for float8_e4m3fn."""
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def fixed_scales(number: int, dtype: torch.dtype) -> Tensor:
    """`number` scales that do not depend on the rows, (number,) in fp32, as an engine has them from a calibration.

    They map 8 to 12, which rows of random numbers do not reach, to the largest number of the type. No two heads have
    the same one, so that a kernel that takes another head's is wrong.
    """
    return torch.linspace(8.0, 12.0, number) / largest_of(dtype)


def held_bytes(caches: Iterable[Any]) -> int:
    """Bytes of the storage behind the caches' tensors, including scales. Shared storage counts once."""
    tensors = (tensor for cache in caches for tensor in (*cache.tensors, *cache.scales))
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def as_bytes(tensor: Tensor) -> Tensor:
    """A view that can be indexed. Older torch cannot index 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
