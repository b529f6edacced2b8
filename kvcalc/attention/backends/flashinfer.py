"""FlashInfer, where it is installed: its batch decode over pages. A dense cache is one page per sequence.

Source of the signature: https://docs.flashinfer.ai/api/decode.html, BatchDecodeWithPagedKVCacheWrapper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, needs_half_on_cuda
from kvcalc.attention.backends.optional import missing, module

_WORKSPACE_BYTES = 128 << 20
_HEAD_WIDTHS = (64, 128, 256)


class FlashInfer(Backend):
    """The wrapper plans for a length on the host, then runs: it plans again when the length or the shape changes."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._wrappers: dict[str, Any] = {}
        self._planned: dict[str, object] = {}

    def why_not(self, case: Case) -> str | None:
        reason = needs_half_on_cuda(case)
        if reason:
            return reason
        if case.is_latent or case.k_width != case.v_width:
            return "its batch decode takes K and V of one width"
        if case.k_width not in _HEAD_WIDTHS:
            return f"has heads of {', '.join(map(str, _HEAD_WIDTHS))}, not {case.k_width}"
        return missing("flashinfer", "flashinfer-python")

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        key, value = cache.tensors
        table = getattr(cache, "table", None)
        # A pool is (pages, tokens, heads, width); a dense cache (sequences, heads, tokens, width).
        kind, page_size, kv_heads = ("HND", key.shape[2], key.shape[1])
        if table is not None:
            kind, page_size, kv_heads = ("NHD", key.shape[1], key.shape[2])
        if kind not in self._wrappers:
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            # Tensor cores from groups of four heads on, as its documentation advises.
            self._wrappers[kind] = module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
                workspace, kind, use_tensor_cores=query.shape[1] // kv_heads >= 4
            )
        wrapper = self._wrappers[kind]
        plan = (id(cache), cache.held, query.shape, scale)
        if self._planned.get(kind) != plan:
            self._plan(wrapper, query, key, table, cache.held, page_size, kv_heads, scale)
            self._planned[kind] = plan
        out: Tensor = wrapper.run(query[:, :, 0], (key, value))
        return out[:, :, None]

    def _plan(
        self, wrapper: Any, query: Tensor, key: Tensor, table: Tensor | None, held: int, page_size: int, kv_heads: int,
        scale: float | None,
    ) -> None:  # fmt: skip
        batch, heads, _, width = query.shape
        made: dict[str, Any] = {"dtype": torch.int32, "device": query.device}
        pages = -(-held // page_size)
        indices = torch.arange(batch, **made) if table is None else table[:, :pages].reshape(-1)
        wrapper.plan(
            torch.arange(0, batch * pages + 1, pages, **made), indices,
            torch.full((batch,), held - (pages - 1) * page_size, **made), heads, kv_heads, width, page_size,
            pos_encoding_mode="NONE", q_data_type=query.dtype, kv_data_type=key.dtype, sm_scale=scale,
        )  # fmt: skip
