"""The kinds of cache: counts, factors and shares."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.model.caches import (
    FullAttention,
    LatentAttention,
    SlidingWindowAttention,
    read_entries,
    share_of_device,
    stored_elements,
)

Plain = FullAttention | SlidingWindowAttention | LatentAttention

CACHES: list[Plain] = [
    FullAttention(4, 8, 8),
    FullAttention(4, 192, 128),
    SlidingWindowAttention(16, 4, 8, 8),
    SlidingWindowAttention(16, 4, 12, 8),
    LatentAttention(32, 8),
    LatentAttention(32, 8, 16),
]
sizes = st.integers(1, 4096)


@given(sizes, sizes, sizes, sizes)
def test_full_attention_is_tokens_times_heads_times_both_widths(t: int, heads: int, k: int, v: int) -> None:
    assert stored_elements(FullAttention(heads, k, v), t) == t * heads * (k + v)


@given(sizes, sizes, sizes)
def test_a_window_keeps_its_last_tokens(t: int, window: int, heads: int) -> None:
    assert stored_elements(SlidingWindowAttention(window, heads, 8, 4), t) == min(t, window) * heads * 12


@given(sizes, sizes, sizes)
def test_a_latent_is_kept_once_for_all_heads(t: int, rank: int, rope: int) -> None:
    assert stored_elements(LatentAttention(rank, rope), t) == t * (rank + rope)


@pytest.mark.parametrize("cache", CACHES, ids=repr)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 1000])
def test_the_factors_a_person_reads_multiply_to_the_count(cache: Plain, tokens: int) -> None:
    assert prod(value for _, value in cache.stored_factors(tokens)) == stored_elements(cache, tokens)
    (entries,) = read_entries(cache, tokens)
    assert entries * stored_elements(cache, 1) == stored_elements(cache, tokens)


@pytest.mark.parametrize("cache", CACHES, ids=repr)
def test_rows_of_one_token_are_what_one_token_stores(cache: Plain) -> None:
    assert sum(cache.token_rows()) == stored_elements(cache, 1)


@pytest.mark.parametrize(("devices", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_heads_are_divided_and_then_replicated(devices: int, heads: int) -> None:
    assert share_of_device(FullAttention(8, 64, 32), devices) == FullAttention(heads, 64, 32)
    assert share_of_device(SlidingWindowAttention(9, 8, 64, 32), devices) == SlidingWindowAttention(9, heads, 64, 32)


def test_a_latent_is_whole_on_every_device() -> None:
    assert share_of_device(LatentAttention(512, 64), 8) == LatentAttention(512, 64)


def test_kinds_and_windows_are_named() -> None:
    assert [(c.kind, c.window) for c in (CACHES[0], CACHES[2], CACHES[4], CACHES[5])] == [
        ("full_attention", None),
        ("sliding_window_attention", 16),
        ("latent_attention", None),
        ("latent_attention", 16),
    ]
