"""FlashAttention-3, for Hopper: GQA and MLA over plain and paged caches, also with fp8.

Source of the signature and limits: https://github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py and
hopper/flash_api.cpp (mha_fwd), at 0251105a of August 2026.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Cache, Case, why_not_latent
from kvcalc.attention.backends.libraries import Kept, Library, page_numbers, why_not_hopper
from kvcalc.attention.cache import divided, largest_of
from kvcalc.attention.ragged import on_device

_FP8 = torch.float8_e4m3fn


class FlashAttn3(Library):
    """Its `flash_attn_with_kvcache`, which splits the keys over the device.

    It reads the parts of a latent as K (the rotary key) and V (the rest), and takes the query's other part as `qv`. It
    multiplies fp8 by fp8: the query is quantized at each step, with a scale for each KV head.
    """

    name, module, distribution = "flash-attn-3", "flash_attn_interface", "flash_attn_3"
    takes_lengths = True
    widest_head = 256
    # The largest page of sequences of different lengths that follow each other.
    page_tokens = 128

    def __init__(self) -> None:
        self._kept = Kept()

    def why_not_cache(self, case: Case) -> str | None:
        if case.stored_dtype == _FP8 and case.scaling != "row":
            return "reads a latent of 16 bits only" if case.is_latent else None
        return super().why_not_cache(case)

    def why_not_shape(self, case: Case) -> str | None:
        if case.is_latent:
            return why_not_latent(case) or why_not_hopper(case.device)
        k, v, unit = case.k_width, case.v_width, 8 if case.stored_dtype is None else 16
        if max(k, v) > self.widest_head:
            return f"supports heads of at most {self.widest_head}, not {max(k, v)}"
        if k != v and not (128 < k <= 192 and 96 < v <= 128) and k > 64:
            return f"does not support V of {v} with K of {k}"
        if k % unit or v % unit:
            return f"needs heads of a multiple of {unit}"
        return why_not_hopper(case.device)

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        key, value, query_of_v, table = cache.tensors[0], cache.tensors[-1], None, cache.table
        q = query.transpose(1, 2)
        if v_width is not None:
            q, query_of_v = q[..., v_width:], q[..., :v_width]
            key, value = key[..., v_width:], value[..., :v_width]
        if cache.is_ragged and table is None:
            size = gcd(self.page_tokens, *cache.starts)
            table = self._kept(
                (query.device, cache.starts, size), lambda: page_numbers(cache.starts, size, query.device)
            )
            key, value = (rows.view(-1, size, *rows.shape[1:]) for rows in (key, value))
        elif table is None:
            # It expects (batch, tokens, heads, width): the same memory with different strides.
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        scales: tuple[Tensor | None, ...] = (None, None, None)
        if key.dtype == _FP8:
            q, of_query = _quantized(q, key.shape[2])
            scales = (of_query, *(_of_heads(kept, cache, len(q)) for kept in cache.scales))
        out: Tensor = self.load().flash_attn_with_kvcache(
            q, key, value, qv=query_of_v, cache_seqlens=on_device(cache.lengths, query.device), page_table=table,
            q_descale=scales[0], k_descale=scales[1], v_descale=scales[2], softmax_scale=scale, causal=False,
        )  # fmt: skip
        return out.transpose(1, 2).to(query.dtype)


def _quantized(query: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The query (batch, 1, heads, width) in fp8, and its scales (batch, KV heads)."""
    rows = query.view(*query.shape[:2], kv_heads, -1, query.shape[-1])
    scale = rows.float().abs().amax(dim=(1, 3, 4)).clamp(min=1e-30) * (1.0 / largest_of(_FP8))
    return divided(rows, scale[:, None, :, None, None], _FP8).flatten(2, 3), scale


def _of_heads(scales: Tensor, cache: Cache, batch: int) -> Tensor:
    """The scales (batch, KV heads) of a cache with one scale per head, or one per tensor."""
    heads_first = cache.table is None and not cache.is_ragged
    one = scales[0, :, 0, 0] if heads_first else scales.flatten(0, -3)[0, :, 0]
    return one.expand(batch, -1)
