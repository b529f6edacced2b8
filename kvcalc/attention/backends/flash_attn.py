"""flash-attn, where it is installed: flash_attn_with_kvcache, over dense or paged caches.

Source of the signature: https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py, version 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, needs_half_on_cuda
from kvcalc.attention.backends.optional import missing, module

# Its pages hold a multiple of so many tokens.
_PAGE_TOKENS = 256
_WIDEST_HEAD = 256


class FlashAttn(Backend):
    """The kernel of FlashAttention-2 that splits the keys of one query over the device."""

    name = "flash-attn"

    def why_not(self, case: Case) -> str | None:
        reason = needs_half_on_cuda(case)
        if reason:
            return reason
        if case.is_latent or case.k_width != case.v_width:
            return "takes K and V of one width"
        if case.k_width > _WIDEST_HEAD:
            return f"takes heads of at most {_WIDEST_HEAD}"
        if case.block_size is not None and case.block_size % _PAGE_TOKENS:
            return f"takes blocks of a multiple of {_PAGE_TOKENS} tokens, not {case.block_size}"
        return missing("flash_attn", "flash-attn")

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        key, value = cache.tensors
        table = getattr(cache, "table", None)
        if table is None:
            # (batch, tokens, heads, width), as it wants them: the same memory, other strides.
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        lengths = torch.full((query.shape[0],), cache.held, dtype=torch.int32, device=query.device)
        out: Tensor = module("flash_attn").flash_attn_with_kvcache(
            query.transpose(1, 2), key, value, cache_seqlens=lengths, block_table=table, softmax_scale=scale,
            causal=False,
        )  # fmt: skip
        return out.transpose(1, 2)
