"""Paged and growing caches hold and return the same rows as a plain cache."""

from __future__ import annotations

import pytest
import torch

from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache, held_bytes

CPU = torch.device("cpu")
SHAPES = ((3, 4), (3, 5))


def make(layout: str, window: int | None, max_tokens: int = 30, block_size: int = 4) -> TokenCache:
    if layout == "paged":
        return PagedCache(2, SHAPES, max_tokens, window, torch.float32, CPU, block_size=block_size, seed=1)
    return (GrowingCache if layout == "growing" else TokenCache)(2, SHAPES, max_tokens, window, torch.float32, CPU)


def rows(first: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(first, first + tokens, dtype=torch.float32)[None, None, :, None]
    return numbers.expand(2, 3, tokens, 4).clone(), numbers.expand(2, 3, tokens, 5).clone()


@pytest.mark.parametrize("layout", ["paged", "growing"])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 29, 50])
@pytest.mark.parametrize("pieces", [[1] * 30, [10, 10, 10], [30], [13, 1, 16]])
def test_the_same_rows_in_the_same_order(layout: str, window: int | None, pieces: list[int]) -> None:
    cache, plain, start = make(layout, window), make("dense", window), 0
    for tokens in pieces:
        for each in (cache, plain):
            each.append(rows(start, tokens))
        start += tokens
        for mine, theirs in zip(cache.in_order(), plain.in_order()):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@pytest.mark.parametrize("window", [None, 4, 7])
def test_a_step_taken_back_can_be_written_again(layout: str, window: int | None) -> None:
    cache = make(layout, window)
    cache.append(rows(0, 9))
    for number in (100, 200, 9):
        cache.append(rows(number, 1))
        if number != 9:
            cache.rewind(9)
    assert [int(n) for n in cache.in_order()[0][0, 0, :, 0]] == list(range(10))[-(window or 10) :]


def test_blocks_lie_in_any_order_and_none_is_shared() -> None:
    cache = make("paged", None)
    assert isinstance(cache, PagedCache)
    assert sorted(cache.table.flatten().tolist()) == list(range(16))
    assert cache.table.flatten().tolist() != list(range(16))


@pytest.mark.parametrize(("window", "blocks"), [(None, 8), (4, 1), (5, 2), (7, 2)])
def test_held_bytes_are_whole_blocks(window: int | None, blocks: int) -> None:
    assert held_bytes([make("paged", window)]) == 2 * blocks * 4 * 3 * 9 * 4


def test_a_grown_cache_holds_no_more_than_its_tokens() -> None:
    for window in (None, 5):
        cache = make("growing", window)
        for start in range(20):
            cache.append(rows(start, 1))
            assert held_bytes([cache]) == 2 * 3 * cache.held * 9 * 4


def test_growing_copies_and_a_plain_cache_does_not() -> None:
    grown, plain = make("growing", None), make("dense", None)
    for cache in (grown, plain):
        cache.append(rows(0, 3))
    before = grown.tensors[0].data_ptr(), plain.tensors[0].data_ptr()
    for cache in (grown, plain):
        cache.append(rows(3, 1))
    assert grown.tensors[0].data_ptr() != before[0]
    assert plain.tensors[0].data_ptr() == before[1]


@pytest.mark.parametrize("layout", ["paged", "growing"])
def test_beyond_the_end_is_an_error(layout: str) -> None:
    cache = make(layout, None)
    with pytest.raises(ValueError, match="do not fit"):
        cache.append(rows(0, 31))


@pytest.mark.parametrize("layout", ["dense", "paged", "growing"])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_rows_and_their_scales_are_counted(layout: str, stored: torch.dtype) -> None:
    made = {"paged": PagedCache, "growing": GrowingCache, "dense": TokenCache}[layout]
    options = {"block_size": 4} if layout == "paged" else {}
    cache = made(2, SHAPES, 8, None, torch.float32, CPU, stored, **options)
    cache.append(rows(1, 8))
    assert held_bytes([cache]) == 2 * 3 * 8 * (9 + 2 * 4)
    torch.testing.assert_close(cache.views()[1], rows(1, 8)[1])
