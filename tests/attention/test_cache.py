"""The preallocated cache: written in place, a ring if there is a window, and bytes counted once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kvcalc.attention.cache import PagedCache, TokenCache, fixed_scales, held_bytes, largest_of, quantize

CPU = torch.device("cpu")


def make(max_tokens: int = 10, window: int | None = None, batch: int = 2) -> TokenCache:
    return TokenCache(batch, ((3, 4), (3, 5)), max_tokens, window, torch.float32, CPU)


def rows(first: int, tokens: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows filled with the number of their position."""
    numbers = torch.arange(first, first + tokens, dtype=torch.float32)[None, None, :, None]
    return numbers.expand(batch, 3, tokens, 4).clone(), numbers.expand(batch, 3, tokens, 5).clone()


def positions(cache: TokenCache) -> list[int]:
    return [int(n) for n in cache.in_order()[1][0, 0, :, 0]]


def test_appending_writes_in_place() -> None:
    cache = make()
    places = [t.data_ptr() for t in cache.tensors]
    for start in range(0, 10, 2):
        cache.append(rows(start, 2))
    assert [t.data_ptr() for t in cache.tensors] == places
    assert positions(cache) == list(range(10))
    assert cache.views()[0].data_ptr() == places[0]


def test_only_what_was_written_can_be_seen() -> None:
    cache = make()
    cache.append(rows(0, 3))
    assert [v.shape for v in cache.views()] == [(2, 3, 3, 4), (2, 3, 3, 5)]


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize("make_cache", [TokenCache, partial(PagedCache, block_size=4)], ids=["dense", "paged"])
def test_a_part_of_the_rows(make_cache: Any, stored: torch.dtype | None) -> None:
    cache = make_cache(2, ((3, 4), (3, 5)), 11, None, torch.float32, CPU, stored)
    cache.append(rows(0, 10))
    for slots in (slice(0, 1), slice(3, 9), slice(8, 20), slice(4, 8), slice(10, 12), slice(None)):
        for part, whole in zip(cache.views(slots), cache.views()):
            assert torch.equal(part, whole[:, :, slots])


def test_beyond_the_end_is_an_error() -> None:
    cache = make()
    cache.append(rows(0, 9))
    with pytest.raises(ValueError, match="do not fit"):
        cache.append(rows(9, 2))
    assert cache.length == 9


@pytest.mark.parametrize("pieces", [[1] * 10, [3, 3, 4], [10], [5, 1, 4], [2, 7, 1], [6, 4]])
@pytest.mark.parametrize("window", [1, 3, 4, 9, 10, 50])
def test_a_ring_holds_the_last_tokens_in_order(pieces: list[int], window: int) -> None:
    cache, start = make(window=window), 0
    assert cache.capacity == min(window, 10)
    for tokens in pieces:
        cache.append(rows(start, tokens))
        start += tokens
        assert positions(cache) == list(range(max(0, start - window), start))


def test_a_step_taken_back_can_be_written_again() -> None:
    for window in (None, 4):
        cache = make(window=window)
        cache.append(rows(0, 6))
        for number in (100, 6):
            cache.append(rows(number, 1))
            if number != 6:
                cache.rewind(6)
        assert positions(cache) == list(range(7))[-(window or 7) :]


def test_a_turned_ring_cannot_bring_back_what_it_replaced() -> None:
    cache = make(window=4)
    cache.append(rows(0, 8))
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(6)
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(9)


def test_held_bytes_are_the_storages() -> None:
    assert held_bytes([make(), make()]) == 2 * (2 * 3 * 10 * (4 + 5)) * 4
    assert held_bytes([make(window=4)]) == 2 * 3 * 4 * 9 * 4


def test_shared_storage_counts_once_and_hidden_storage_counts() -> None:
    one = make()
    assert held_bytes([one, one]) == held_bytes([one])
    one.tensors = (one.tensors[0], one.tensors[0][:, :, 1:])
    assert held_bytes([one]) == 2 * 3 * 10 * 4 * 4
    # A view keeps its whole storage alive.
    one.tensors = (torch.zeros(2, 3, 20, 4)[:, :, :10],)
    assert held_bytes([one]) == 2 * 3 * 20 * 4 * 4


def test_a_scale_is_the_product_with_the_reciprocal() -> None:
    """As torch divides by a number on CUDA, and not as it does on a CPU: the fused step must give the same bits."""
    rows = torch.linspace(0.1, 9.0, 500)[:, None].expand(-1, 4)
    reciprocal = torch.tensor(1 / 127)
    _, scales = quantize(rows, torch.int8)
    assert torch.equal(scales, rows[:, :1] * reciprocal)
    assert not torch.equal(scales, rows[:, :1] / torch.tensor(127.0)), "the two differ on a CPU"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_no_two_heads_have_the_same_fixed_scale(dtype: torch.dtype) -> None:
    scales = fixed_scales(5, dtype) * largest_of(dtype)
    assert scales.tolist() == pytest.approx([8, 9, 10, 11, 12])
