"""FlashMLA, where it is installed: one stream of the latent, V its first 512 elements.

Source of the signature: https://github.com/deepseek-ai/FlashMLA, flash_mla_interface.py; get_mla_metadata takes the
lengths in its first releases and ignores them in later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, needs_half_on_cuda
from kvcalc.attention.backends.optional import missing, module

_PAGE_TOKENS = 64
_WIDTHS = (576, 512)


class FlashMla(Backend):
    """DeepSeek's decode kernel for Hopper and later. A dense cache is cut into its pages of 64 tokens."""

    name = "flashmla"

    def why_not(self, case: Case) -> str | None:
        if not case.is_latent:
            return "runs MLA alone"
        reason = needs_half_on_cuda(case)
        if reason:
            return reason
        if (case.k_width, case.v_width) != _WIDTHS:
            return f"takes a latent of 512 + 64, not {case.v_width} + {case.k_width - case.v_width}"
        if case.block_size not in (None, _PAGE_TOKENS):
            return f"takes blocks of {_PAGE_TOKENS} tokens, not {case.block_size}"
        if torch.cuda.get_device_capability(case.device) < (9, 0):
            return "needs compute capability 9.0"
        return missing("flash_mla", "flash-mla")

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        flash_mla = module("flash_mla")
        (latent,) = cache.tensors
        table = getattr(cache, "table", None)
        batch, heads = query.shape[:2]
        if table is None:
            latent, table = _pages(latent)
        lengths = torch.full((batch,), cache.held, dtype=torch.int32, device=query.device)
        plan, splits = flash_mla.get_mla_metadata(lengths, heads, 1)
        out, _ = flash_mla.flash_mla_with_kvcache(
            query.transpose(1, 2), latent, table, lengths, v_width, plan, splits, softmax_scale=scale, causal=False
        )
        result: Tensor = out
        return result.transpose(1, 2)


def _pages(latent: Tensor) -> tuple[Tensor, Tensor]:
    """A dense latent (batch, 1, tokens, width) as pages and their table: not copied where the tokens fill them."""
    batch, _, tokens, width = latent.shape
    short = -tokens % _PAGE_TOKENS
    if short:
        latent = torch.nn.functional.pad(latent, (0, 0, 0, short))
    pages = latent.reshape(-1, _PAGE_TOKENS, 1, width)
    table = torch.arange(pages.shape[0], dtype=torch.int32, device=latent.device).view(batch, -1)
    return pages, table
