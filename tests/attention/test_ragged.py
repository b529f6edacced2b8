"""Sequences of different lengths: what the cache keeps, and all backends that run without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvcalc.attention.backends import BACKENDS, Case
from kvcalc.attention.cache import TokenCache, held_bytes
from kvcalc.attention.core import eager_attention
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.ragged import RaggedCache

CPU = torch.device("cpu")
LENGTHS = (37, 400, 5, 129)


def filled(
    shapes: tuple[tuple[int, int], ...], window: int | None = None, dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None, block_size: int | None = None, lengths: tuple[int, ...] = LENGTHS,
) -> tuple[RaggedCache, list[Tensor]]:  # fmt: skip
    """A cache after long prompts and three single tokens, and the rows that were appended."""
    cache = RaggedCache(lengths, shapes, window, dtype, CPU, stored, block_size=block_size, seed=1)
    most = max(lengths)
    torch.manual_seed(0)
    rows = [torch.randn(len(lengths), heads, most, width).to(dtype) for heads, width in shapes]
    for a, b in ((0, 20), (20, most - 3), (most - 3, most - 2), (most - 2, most - 1), (most - 1, most)):
        cache.append(tuple(row[:, :, a:b] for row in rows))
    return cache, rows


def expected(
    query: Tensor, cache: RaggedCache, rows: list[Tensor], scale: float, v_width: int | None, window: int | None = None
) -> Tensor:
    """Attention in fp32 of every sequence over its own last rows, as they were appended, or in 8 bits as kept."""
    outs = []
    for number, (one, tokens) in enumerate(zip(cache.each(), LENGTHS)):
        first = rows[0].shape[2] - min(tokens, window or tokens)
        own = [row[number : number + 1, :, first:].float() for row in rows]
        kept = own if cache.stored_dtype is None else [view.float() for view in one.in_order()]
        key, value = kept if v_width is None else (kept[0], kept[0][..., :v_width])
        outs.append(eager_attention(query[number : number + 1].float(), key, value, scale=scale))
    return torch.cat(outs)


@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", ["grouped-sdpa", "grouped-matmul", "native", "repeat-kv"])
def test_as_each_sequence_alone(
    name: str, window: int | None, stored: torch.dtype | None, block_size: int | None
) -> None:
    if name == "native" and (reason := BACKENDS["native"].why_not(Case(CPU, torch.float32, 1, 1, 16, 16))):
        pytest.skip(reason)
    for shapes, v_width in ((((2, 32), (2, 48)), None), (((1, 96),), 64)):
        cache, rows = filled(shapes, window, stored=stored, block_size=block_size)
        assert cache.lengths == tuple(min(tokens, window or tokens) for tokens in LENGTHS)
        query = torch.randn(4, 8 if v_width is None else 72, 1, shapes[0][1])
        out = BACKENDS[name].attend(query, cache, 0.2, v_width)
        torch.testing.assert_close(out, expected(query, cache, rows, 0.2, v_width, window), atol=3e-5, rtol=1e-3)


@pytest.mark.parametrize(("block_size", "rows"), [(None, 37 + 400 + 5 + 129), (16, 16 * (3 + 25 + 1 + 9))])
@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_each_sequence_holds_its_own_tokens(block_size: int | None, rows: int, stored: torch.dtype | None) -> None:
    cache, _ = filled(((2, 32), (2, 48)), stored=stored, block_size=block_size)
    assert held_bytes([cache]) == rows * 2 * ((32 + 48) * 4 if stored is None else 32 + 48 + 2 * 4)


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_step_can_be_taken_back(block_size: int | None) -> None:
    cache, _ = filled(((2, 8), (2, 8)), 30, block_size=block_size)
    before = [[view.clone() for view in one.in_order()] for one in cache.each()]
    cache.rewind(399)
    assert cache.lengths == (30, 30, 4, 30)
    cache.append(tuple(torch.stack([rows[n][0, :, -1:] for rows in before]) for n in range(2)))
    for one, rows in zip(cache.each(), before):
        assert all(torch.equal(*pair) for pair in zip(one.in_order(), rows))
    with pytest.raises(ValueError, match="do not fit a cache of 400"):
        cache.append(tuple(torch.zeros(4, 2, 1, 8) for _ in range(2)))


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("expands", [None, False, True])
def test_layers_decode_as_each_sequence_alone(block_size: int | None, expands: bool | None) -> None:
    """Positions, rows and attention of every sequence are those it has in a cache of its own."""
    torch.manual_seed(0)
    if expands is None:
        layer: Any = GroupedAttention(64, 8, 2, rope_dim=8)
    else:
        layer = MultiHeadLatentAttention(64, 4, 24, 16, 8, 16)
        layer.expands = expands
    layer.eval()
    lengths, steps = (9, 20, 14), 3
    x = torch.randn(3, 20, 64)
    with torch.inference_mode():
        ragged = RaggedCache(lengths, layer.cache_shapes(), None, torch.float32, CPU, block_size=block_size)
        alone = [TokenCache(1, layer.cache_shapes(), n, None, torch.float32, CPU) for n in lengths]
        for number, (one, own, tokens) in enumerate(zip(ragged.each(), alone, lengths)):
            for cache in (one, own):
                layer(x[number : number + 1, 20 - tokens : 20 - steps], cache)
        ragged.length = 20 - steps
        for step in range(20 - steps, 20):
            together = layer(x[:, step : step + 1], ragged)
            apart = [layer(x[n : n + 1, step : step + 1], own) for n, own in enumerate(alone)]
            torch.testing.assert_close(together, torch.cat(apart))
