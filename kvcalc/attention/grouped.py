"""Multi-head, grouped-query and multi-query attention: one module, selected by the number of KV heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcalc.attention.backends import BACKENDS, Backend
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.core import causal_attention, grouped_attention, split_heads
from kvcalc.attention.masks import causal_mask, combine_masks
from kvcalc.attention.rope import RotaryEmbedding
from kvcalc.attention.step import rotate_and_append


class GroupedAttention(nn.Module):
    """Attention of `num_heads` query heads over `num_kv_heads` heads of keys and values, with its output projection.

    - `num_kv_heads` equal to `num_heads` is MHA, 1 is MQA, and any other divisor is GQA: query head i reads KV head
      i // (H / G) (Ainslie et al. 2023).
    - With `rope_dim` 0, the caller adds positions.
    - `window` limits the attention of every token to the last `window` tokens.
    - `output_gate` multiplies the heads' output by a sigmoid gate of the input (Qwen3NextAttention, Transformers
      5.23.0, where the query projection includes the gate's). `head_gate` does so with one gate per head.
    - `causal` is False for an encoder or for cross-attention.
    - Dropout applies to the attention weights, only in training.
    - `core` runs single tokens. It can be replaced by another of `kvcalc.attention.backends`.

    Raises ValueError if num_kv_heads does not divide num_heads, or if head_dim is None and num_heads does not divide
    hidden_size.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        output_gate: bool = False,
        head_gate: bool = False,
        rope_dim: int = 0,
        rope_theta: float = 10_000.0,
        window: int | None = None,
        causal: bool = True,
        dropout: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(f"num_heads {num_heads} does not divide hidden_size {hidden_size}")
            head_dim = hidden_size // num_heads
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.window, self.causal, self.dropout = window, causal, dropout
        self.is_cross = False
        """Whether `forward` only attends to what is already in its cache: an encoder's K and V."""
        self.core: Backend = BACKENDS["grouped-sdpa"]
        made = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=qkv_bias, **made)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, **made)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * v_head_dim, bias=qkv_bias, **made)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=output_bias, **made)
        gates = num_gates(num_heads, v_head_dim, output_gate, head_gate)
        self.gate_proj = nn.Linear(hidden_size, gates, bias=qkv_bias and output_gate, **made) if gates else None
        self.rope = RotaryEmbedding(rope_dim, rope_theta, device=device) if rope_dim else None

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of the tensors in this layer's `TokenCache`: K, then V."""
        return ((self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.v_head_dim))

    def forward(
        self,
        x: Tensor,
        cache: TokenCache | None = None,
        mask: Tensor | None = None,
        source: Tensor | None = None,
    ) -> Tensor:
        """Attend from the tokens of `x`, (batch, tokens, hidden_size). Returns the same shape.

        With `cache`, the tokens follow those already cached, and are cached too. `mask` is an additional mask of shape
        (batch or 1, 1, tokens or 1, keys) over all tokens so far. It is True at positions that a query may not attend
        to. With `source` (batch, source tokens, hidden_size) this is cross-attention: keys and values come from
        `source`. Once the cache holds them, they come only from the cache, and `source` may have 0 tokens.
        """
        if self.is_cross and cache is not None:
            query = split_heads(self.q_proj(x), self.num_heads)
            key, value = cache.views()
            out = self.attend(query, cache) if x.shape[1] == 1 else grouped_attention(query, key, value)
            return self._project(out, x)
        if source is None and mask is None and not self.training:
            start = 0 if cache is None else cache.length
            is_step = cache is not None and x.shape[1] == 1
            # These are the first tokens, and each attends to all tokens up to itself.
            is_prompt = self.causal and start == 0 and (self.window or x.shape[1]) >= x.shape[1]
            if is_step or is_prompt:
                query, key, value = self._project_in(x)
                if cache is not None and is_step:
                    query = rotate_and_append(self.rope, query, key, cache, value=value)
                    return self._project(self.attend(query, cache), x)
                query, key = self._rotated(query, start), self._rotated(key, start)
                if cache is not None:
                    cache.append((key, value))
                return self._project(causal_attention(query, key, value), x)
        query, key, value, mask = self._prepare(x, cache, mask, source)
        return self._project(grouped_attention(query, key, value, mask, self.dropout if self.training else 0.0), x)

    def attend(self, query: Tensor, cache: TokenCache) -> Tensor:
        """Only the core of one decode step: `query` (batch, num_heads, 1, head_dim) over the cached rows."""
        return self.core.attend(query, cache)

    def core_query_shape(self, batch_size: int) -> tuple[int, int, int, int]:
        """The shape of the query that `attend` takes for one token of each sequence."""
        return (batch_size, self.num_heads, 1, self.head_dim)

    def _prepare(
        self, x: Tensor, cache: TokenCache | None, mask: Tensor | None, source: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        if source is None:
            start = 0 if cache is None else cache.length
            query, key, value = self._project_in(x)
            query, key = self._rotated(query, start), self._rotated(key, start)
            if cache is not None:
                (key, value), mask = extend(cache, (key, value), mask)
            if self.causal and (cache is None or x.shape[1] > 1):
                mask = combine_masks(causal_mask(x.shape[1], key.shape[2], self.window, x.device), mask)
            return query, key, value, mask
        query = split_heads(self.q_proj(x), self.num_heads)
        if cache is None or not cache.length or source.shape[1]:
            key, value = (split_heads(project(source), self.num_kv_heads) for project in (self.k_proj, self.v_proj))
            if cache is None:
                return query, key, value, mask
            cache.append((key, value))
        key, value = cache.views()
        return query, key, value, mask

    def _project_in(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the tokens of `x`, without positions."""
        query = split_heads(self.q_proj(x), self.num_heads)
        key, value = (split_heads(project(x), self.num_kv_heads) for project in (self.k_proj, self.v_proj))
        return query, key, value

    def _rotated(self, heads: Tensor, start: int) -> Tensor:
        return heads if self.rope is None else self.rope(heads, start)

    def _project(self, out: Tensor, x: Tensor) -> Tensor:
        projected: Tensor = self.o_proj(gated(out, x, self.gate_proj))
        return projected


def num_gates(num_heads: int, v_head_dim: int, output_gate: bool, head_gate: bool) -> int:
    """The gates of a layer's output: one for each element or for each head, or 0."""
    return num_heads * v_head_dim * output_gate or num_heads * head_gate


def gated(out: Tensor, x: Tensor, gate: nn.Module | None) -> Tensor:
    """The heads' output (batch, heads, tokens, width) as (batch, tokens, heads * width), times a gate of the input.

    `gate` gives one number per element or per head.
    """
    heads = out.transpose(1, 2)
    if gate is not None:
        gates: Tensor = torch.sigmoid(gate(x))
        heads = heads * gates.view(*heads.shape[:3], -1)
    return heads.flatten(2)


def extend(
    cache: TokenCache, rows: tuple[Tensor, ...], mask: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Cache the rows of the new tokens. Returns the rows they may attend to, and `mask` cut to those rows.

    One token attends to the cache in place. A ring's slots are out of order, which makes no difference without a mask.
    Several tokens in a ring need rows that they overwrite, so these rows are copied first.
    """
    tokens = rows[0].shape[2]
    ring = cache.capacity < cache.max_tokens
    if ring and (tokens > 1 or mask is not None):
        keys = tuple(torch.cat((old, new), dim=2) for old, new in zip(cache.in_order(), rows))
        cache.append(rows)
        if tokens == 1:
            keys = tuple(key[:, :, -cache.capacity :] for key in keys)
    else:
        cache.append(rows)
        keys = cache.views()
    return keys, None if mask is None else mask[..., -keys[0].shape[2] :]
