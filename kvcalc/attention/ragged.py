"""A cache of sequences of different lengths, as in a server's batch. Each has rows for its own tokens alone."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from kvcalc.attention.cache import PagedCache, TokenCache, as_bytes


class RaggedCache(TokenCache):
    """Like `TokenCache`, but sequence b ends with `lengths[b]` tokens. All of them grow by the same tokens at a time.

    `length` is that of the longest sequence, and sequence b is `behind[b]` tokens shorter. Every tensor is a pool
    (rows, heads, width), in which sequence b begins at row `starts[b]`. With a `block_size` it is a pool of blocks as
    in `PagedCache`, and `table` has a row for each sequence, of which a shorter one uses only the first entries.
    """

    is_ragged = True

    def __init__(
        self, lengths: tuple[int, ...], shapes: tuple[tuple[int, int], ...], window: int | None, dtype: torch.dtype,
        device: torch.device, stored_dtype: torch.dtype | None = None, scaling: str = "row", *,
        block_size: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.capacities = tuple(tokens if window is None else min(window, tokens) for tokens in lengths)
        self.block_size = block_size
        page = block_size or 1
        pages = [-(-capacity // page) for capacity in self.capacities]
        self.starts = (0, *accumulate(pages))
        super().__init__(len(lengths), shapes, max(lengths), window, dtype, device, stored_dtype, scaling)
        self.behind = tuple(self.max_tokens - tokens for tokens in lengths)
        if block_size is not None:
            order = torch.randperm(self.starts[-1], generator=torch.Generator().manual_seed(seed)).to(torch.int32)
            table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
            for number, count in enumerate(pages):
                table[number, :count] = order[self.starts[number] : self.starts[number + 1]]
            self.table = table.to(device)
        kind = _Sequence if block_size is None else _PagedSequence
        self._each: list[TokenCache] = [kind(self, number) for number in range(len(lengths))]

    def _shape(self, batch_size: int, heads: int, width: int) -> tuple[int, ...]:
        rows = self.starts[-1]
        return (rows, heads, width) if self.block_size is None else (rows, self.block_size, heads, width)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(max(0, min(self.length - behind, most)) for behind, most in zip(self.behind, self.capacities))

    def each(self) -> list[TokenCache]:
        for cache, behind in zip(self._each, self.behind):
            cache.length = max(0, self.length - behind)
        return self._each

    def views(self, slots: slice = slice(None)) -> tuple[Tensor, ...]:
        raise TypeError("sequences of different lengths have no common view: see `each`")

    def append(self, rows: tuple[Tensor, ...]) -> None:
        """Write the rows of the next tokens. `rows` has one (batch, heads, tokens, width) per cache tensor.

        A sequence that has not begun yet takes only the last rows, and none if it begins later.
        """
        tokens = rows[0].shape[2]
        if self.length + tokens > self.max_tokens:
            raise ValueError(f"{self.length} + {tokens} tokens do not fit a cache of {self.max_tokens}")
        if tokens == 1 and self.length >= max(self.behind):
            self._append_one(rows)
        else:
            for number, (cache, behind) in enumerate(zip(self.each(), self.behind)):
                new = min(tokens, self.length + tokens - behind)
                if new > 0:
                    cache.append(tuple(row[number : number + 1, :, tokens - new :] for row in rows))
        self.length += tokens

    def numbers(self, name: str) -> Tensor:
        """`starts`, `capacities`, `behind` or `lengths` on the device, int32. Copied there once for each value."""
        return on_device(getattr(self, name), self.tensors[0].device)

    def _append_one(self, rows: tuple[Tensor, ...]) -> None:
        """All sequences at once. Nothing is copied from the host, so that a graph may contain it."""
        slots = (self.length - self.numbers("behind")) % self.numbers("capacities")
        if self.table is None or self.block_size is None:
            at = self.numbers("starts")[:-1] + slots
        else:
            blocks = self.table.gather(1, (slots // self.block_size).long()[:, None])[:, 0]
            at = blocks * self.block_size + slots % self.block_size
        for tensor, new in zip((*self.tensors, *self.scales), self._quantized(rows)):
            as_bytes(tensor.view(-1, *tensor.shape[-2:]))[at.long()] = as_bytes(new[:, :, 0].contiguous())


class _Sequence(TokenCache):
    """One sequence of a `RaggedCache`, with its rows in the same memory."""

    def __init__(self, whole: RaggedCache, number: int) -> None:
        _copy_sizes(self, whole, number)
        rows = slice(whole.starts[number], whole.starts[number + 1])
        self.tensors, self.scales = (
            tuple(pool[rows].transpose(0, 1)[None] for pool in pools) for pools in (whole.tensors, whole.scales)
        )


class _PagedSequence(PagedCache):
    """One sequence of a `RaggedCache`, with its blocks in the same memory."""

    def __init__(self, whole: RaggedCache, number: int) -> None:
        _copy_sizes(self, whole, number)
        self.block_size, self.tensors, self.scales = whole.block_size or 1, whole.tensors, whole.scales
        if whole.table is not None:
            self._set_table(whole.table[number : number + 1, : self.num_blocks])


def _copy_sizes(cache: TokenCache, whole: RaggedCache, number: int) -> None:
    cache.scaling, cache._fixed = whole.scaling, whole._fixed
    cache.batch_size, cache.dtype, cache.stored_dtype, cache.length = 1, whole.dtype, whole.stored_dtype, 0
    cache.capacity, cache.max_tokens = whole.capacities[number], whole.max_tokens - whole.behind[number]


@lru_cache(maxsize=64)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """`numbers` as int32. The last few are kept, so that they are there when a graph is captured."""
    return torch.tensor(numbers, dtype=torch.int32).to(device)
