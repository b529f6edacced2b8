"""The reference of the decode kernels: the same step over the same rows in fp32, a part of the tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.measure.layers.build import AttentionLayer

# The largest temporary, in bytes.
CHUNK_BYTES = 64 << 20

KeysAndValues = Callable[[slice], tuple[Tensor, Tensor]]


def aimed_query(layer: AttentionLayer, query: Tensor, cache: TokenCache) -> Tensor:
    """`query` plus, for each head, a multiple of one cached key, so that the head attends mostly to that one token.

    The heads aim at tokens from the first to the last one. With random queries alone, every token counts equally
    little, and a kernel that leaves some out is hardly wrong.
    """
    if cache.is_ragged:
        return _of_each(aimed_query, layer, query, cache)
    heads, held = query.shape[1], cache.held
    tokens = torch.linspace(0, held - 1, heads).round().long().tolist()
    pieces = _reader(layer, cache)
    aims = []
    for head, token in enumerate(tokens):
        key, _ = pieces(slice(token, token + 1))
        row = key[:, head * key.shape[1] // heads, 0].float()
        length = row.square().sum(-1, keepdim=True).clamp(min=1e-30)
        # Each other token has a weight of about 1, and this one e ** 2 times as much as all of them.
        aims.append(row * ((math.log(held) + 2) / _scale(layer, query) / length))
    return (query.float() + torch.stack(aims, dim=1)[:, :, None]).to(query.dtype)


def attend_in_fp32(layer: AttentionLayer, query: Tensor, cache: TokenCache) -> Tensor:
    """What `layer.attend(query, cache)` should return, (batch, heads, 1, V's width) in fp32.

    The rows are those that the cache returns: errors of 8-bit types are not errors of a kernel. The softmax is summed
    up over parts of the tokens (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
    """
    if cache.is_ragged:
        return _of_each(attend_in_fp32, layer, query, cache)
    batch, heads, _, width = query.shape
    pieces = _reader(layer, cache)
    groups = pieces(slice(0, 1))[0].shape[1]
    rows = query.float().reshape(batch, groups, heads // groups, width) * _scale(layer, query)
    chunk = max(1, CHUNK_BYTES // (4 * batch * (heads + 2 * groups * width)))
    highest = torch.full((batch, groups, heads // groups, 1), float("-inf"), device=query.device)
    total, out = torch.zeros_like(highest), torch.zeros(1, device=query.device)
    for first in range(0, cache.held, chunk):
        key, value = (part.float() for part in pieces(slice(first, min(first + chunk, cache.held))))
        scores = rows @ key.transpose(-1, -2)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, shrunk = (scores - higher).exp(), (highest - higher).exp()
        total, out, highest = total * shrunk + weights.sum(-1, keepdim=True), out * shrunk + weights @ value, higher
        # The next part must not exist beside this one.
        del key, value, scores, weights
    return (out / total).reshape(batch, heads, 1, -1)


def _of_each(
    function: Callable[[AttentionLayer, Tensor, TokenCache], Tensor], layer: AttentionLayer, query: Tensor,
    cache: TokenCache,
) -> Tensor:  # fmt: skip
    """The results of `function` for every sequence of a ragged cache."""
    return torch.cat([function(layer, query[n : n + 1], own_cache) for n, own_cache in enumerate(cache.each())])


def relative_error(out: Tensor, expected: Tensor) -> float:
    """The largest error of a head's output, relative to the norm of that output. NaN if there is one."""
    wrong = (out.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    return float("nan") if bool(wrong.isnan().any()) else float(wrong.max().item())


def _scale(layer: AttentionLayer, query: Tensor) -> float:
    return float(query.shape[-1] ** -0.5 if isinstance(layer, GroupedAttention) else layer.scale)


def _reader(layer: AttentionLayer, cache: TokenCache) -> KeysAndValues:
    """A function that returns K and V of some tokens, (batch, groups, tokens, width), as `layer` sees them."""

    def read(tokens: slice) -> tuple[Tensor, Tensor]:
        rows = cache.views(tokens)
        if isinstance(layer, GroupedAttention):
            return rows[0], rows[1]
        return layer.rebuilt(rows[0]) if layer.expands else (rows[0], rows[0][..., : layer.rank])

    return read
