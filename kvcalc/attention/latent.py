"""Multi-head latent attention (MLA): a low-rank latent is cached instead of keys and values.

Source: DeepSeek-V2, Liu et al. 2024, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvcalc.attention.backends import BACKENDS, Backend
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.core import causal_attention, grouped_attention, split_heads
from kvcalc.attention.grouped import extend, gated, num_gates
from kvcalc.attention.masks import causal_mask, combine_masks
from kvcalc.attention.rope import RotaryEmbedding
from kvcalc.attention.step import rotate_and_append


class HeadProduct(nn.Module):
    """x @ weight for every head. It is a module, like Linear, so that a caller can run it in another precision."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x (batch, heads, tokens, a) by weight (heads, a, b). Returns (batch, heads, tokens, b)."""
        return x @ weight


class MultiHeadLatentAttention(nn.Module):
    """MLA with its output projection.

    Every token caches kv_lora_rank + qk_rope_head_dim elements, once for all heads. Without a cache, keys and values
    are rebuilt from the latent (W_UK, W_UV). With a cache, W_UK is absorbed into the query and W_UV into the output.
    Attention then runs over the latents. The result is the same, and nothing is stored per head.

    - With `q_lora_rank` 0, the query is projected directly.
    - `qkv_bias` adds a bias to the projections of the input, except to a direct query projection, as in
      DeepseekV3Attention (Transformers 5.23.0).
    - `window` limits the attention of every token to the last `window` tokens (only for what-if questions).
    - `output_gate` multiplies the heads' output by a sigmoid gate of the input (Kimi K3), `head_gate` with one gate per
      head (Ling 3).
    - `core` runs single tokens over the latents. It can be replaced by another of `kvcalc.attention.backends`.
    - With `expands`, every decode step rebuilds K and V of all cached tokens, to show what absorption saves.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        *,
        q_lora_rank: int = 0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        output_gate: bool = False,
        head_gate: bool = False,
        rope_theta: float = 10_000.0,
        window: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.rank = num_heads, kv_lora_rank
        self.nope, self.rope_width, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.window = window
        self.core: Backend = BACKENDS["grouped-sdpa"]
        self.expands = False
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        made = {"device": device, "dtype": dtype}
        query_width = num_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank:
            self.q_proj: nn.Module = nn.Sequential(
                nn.Linear(hidden_size, q_lora_rank, bias=qkv_bias, **made),
                nn.RMSNorm(q_lora_rank, eps=1e-6, device=device, dtype=dtype),
                nn.Linear(q_lora_rank, query_width, bias=False, **made),
            )
        else:
            self.q_proj = nn.Linear(hidden_size, query_width, bias=False, **made)
        self.kv_down = nn.Linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=qkv_bias, **made)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=1e-6, device=device, dtype=dtype)
        # One up-projection contains W_UK and W_UV of every head: (heads * (nope + v), rank).
        self.kv_up = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False, **made)
        self.o_proj = nn.Linear(num_heads * v_head_dim, hidden_size, bias=output_bias, **made)
        gates = num_gates(num_heads, v_head_dim, output_gate, head_gate)
        self.gate_proj = nn.Linear(hidden_size, gates, bias=False, **made) if gates else None
        self.per_head = HeadProduct()
        self.rope = RotaryEmbedding(qk_rope_head_dim, rope_theta, device=device)

    def cache_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, width) of the single tensor in this layer's `TokenCache`: the latent, then the rotary key."""
        return ((1, self.rank + self.rope_width),)

    def forward(self, x: Tensor, cache: TokenCache | None = None, mask: Tensor | None = None) -> Tensor:
        """Causal attention from the tokens of `x`, (batch, tokens, hidden_size). Returns the same shape.

        With `cache`, the tokens follow those already cached, and are cached too. `mask` is an additional mask of shape
        (batch or 1, 1, tokens or 1, keys) over all tokens so far. It is True at positions that a query may not attend
        to.
        """
        start = 0 if cache is None else cache.length
        query_nope, query_rope, content, key_rope = self._project(x)
        if cache is not None and x.shape[1] == 1 and mask is None:
            query_rope = rotate_and_append(self.rope, query_rope, key_rope, cache, front=content)
            if self.expands:
                return self._output(self.attend(torch.cat((query_nope, query_rope), dim=-1), cache), x)
            return self._output_absorbed(self.attend(self._absorbed(query_nope, query_rope), cache), x)
        query_rope, latent = self.rope(query_rope, start), torch.cat((content, self.rope(key_rope, start)), dim=-1)
        if mask is None and start == 0 and x.shape[1] > 1 and (self.window or x.shape[1]) >= x.shape[1]:
            if cache is not None:
                cache.append((latent,))
            key, value = self.rebuilt(latent)
            return self._output(causal_attention(torch.cat((query_nope, query_rope), dim=-1), key, value), x)
        if cache is not None:
            (latent,), mask = extend(cache, (latent,), mask)
        if cache is None or x.shape[1] > 1:
            mask = combine_masks(causal_mask(x.shape[1], latent.shape[2], self.window, x.device), mask)
        if cache is None or x.shape[1] >= self.tokens_worth_expanding:
            key, value = self.rebuilt(latent)
            return self._output(grouped_attention(torch.cat((query_nope, query_rope), dim=-1), key, value, mask), x)
        query = self._absorbed(query_nope, query_rope)
        out = grouped_attention(query, latent, latent[..., : self.rank], mask, scale=self.scale)
        return self._output_absorbed(out, x)

    def attend(self, query: Tensor, cache: TokenCache) -> Tensor:
        """Only the core of one decode step: `query` (batch, num_heads, 1, width) over the cached rows.

        If absorbed, the width of the query and of the cached rows is rank + rope, and the result is (batch, num_heads,
        1, rank). If expanded, the width is nope + rope, keys and values are rebuilt first, and the result is (batch,
        num_heads, 1, v_head_dim).
        """
        if not self.expands:
            return self.core.attend(query, cache, self.scale, self.rank)
        each = cache.each()
        parts = query.chunk(len(each))
        outs = [self.core(part, *self.rebuilt(*one.views())) for part, one in zip(parts, each)]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def core_query_shape(self, batch_size: int) -> tuple[int, int, int, int]:
        """The shape of the query that `attend` takes for one token of each sequence."""
        return (batch_size, self.num_heads, 1, (self.nope if self.expands else self.rank) + self.rope_width)

    @property
    def tokens_worth_expanding(self) -> int:
        """The number of prompt tokens from which rebuilding K and V is cheaper than attending over latents.

        Per cached token and head, rebuilding takes rank * (nope + v) products. Each query then saves the difference
        between the widths of the two representations.
        """
        saved = 2 * self.rank - self.nope - self.v_head_dim
        return 2 if saved <= 0 else -(-self.rank * (self.nope + self.v_head_dim) // saved)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The query parts without and with position, (B, H, n, nope) and (B, H, n, rope), and the same of the new rows.

        The parts with position are not rotated yet.
        """
        query = split_heads(self.q_proj(x), self.num_heads)
        down = self.kv_down(x)[:, None]
        content = self.kv_norm(down[..., : self.rank])
        return query[..., : self.nope], query[..., self.nope :], content, down[..., self.rank :]

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK (heads, nope, rank) and W_UV (heads, v, rank), as views of one weight."""
        weight = self.kv_up.weight.view(self.num_heads, -1, self.rank)
        return weight[:, : self.nope], weight[:, self.nope :]

    def _absorbed(self, query_nope: Tensor, query_rope: Tensor) -> Tensor:
        """The query for attention over latents, with W_UK absorbed: (batch, num_heads, n, rank + rope)."""
        return torch.cat((self.per_head(query_nope, self._up()[0]), query_rope), dim=-1)

    def _output_absorbed(self, out: Tensor, x: Tensor) -> Tensor:
        """The output of attention over latents: apply W_UV, then `_output`."""
        return self._output(self.per_head(out, self._up()[1].transpose(-1, -2)), x)

    def rebuilt(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Rebuild keys and values of every head from the latent, as the paper defines MLA."""
        w_uk, w_uv = self._up()
        content, key_rope = latent[..., : self.rank], latent[..., self.rank :]
        key = torch.cat(
            (self.per_head(content, w_uk.transpose(-1, -2)), key_rope.expand(-1, self.num_heads, -1, -1)), dim=-1
        )
        return key, self.per_head(content, w_uv.transpose(-1, -2))

    def _output(self, out: Tensor, x: Tensor) -> Tensor:
        projected: Tensor = self.o_proj(gated(out, x, self.gate_proj))
        return projected
