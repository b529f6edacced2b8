"""torch's flex_attention, compiled for fixed shapes.

K and V are read at full capacity, and rows that are not yet written are masked. So the shapes stay the same in every
step, and nothing is recompiled. Only a number on the device changes.

Each capacity is compiled for. After a few, torch would stop compiling, and run flex_attention without fusing
it, 50 times slower. Then this backend fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case

# More capacities than a sweep has. torch's own limit is 8.
_MOST_COMPILED = 1000
# Its kernel for larger tensors, with 64-bit positions, does not compile: torch 2.11 with Triton 3.6 on an H100.
_MOST_ELEMENTS = 2**31 - 1


class Flex(Backend):
    """flex_attention through torch.compile."""

    name = "flex"
    compiles_each_shape = True

    def __init__(self) -> None:
        self._compiled: Any = None
        # For each device, the number of rows in the cache and the function that masks the others. All calls must use
        # the same function, or each call would compile again.
        self._hide: dict[torch.device, tuple[Tensor, Callable[..., Tensor]]] = {}

    def why_not(self, case: Case) -> str | None:
        if case.device.type == "mps":
            return "torch does not compile flex_attention for Apple's GPU"
        if case.is_ragged:
            return "compiles for each length"
        if case.layout != "dense" or case.stored_dtype is not None:
            return "needs a dense cache in the compute dtype"
        if case.is_latent:
            return "needs V as a separate tensor, not as part of the latent"
        if case.k_width & (case.k_width - 1) or case.v_width & (case.v_width - 1):
            return f"needs head widths that are powers of two, not {case.k_width} and {case.v_width}"
        return None

    def why_not_unasked(self, case: Case) -> str | None:
        return "compiling takes longer than most runs on a CPU" if case.device.type == "cpu" else None

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        key, value = cache.tensors
        if query.device.type == "cuda" and max(key.numel(), value.numel()) > _MOST_ELEMENTS:
            raise RuntimeError(f"torch does not compile flex_attention for more than {_MOST_ELEMENTS:,} elements of K")
        if query.device not in self._hide:
            self._hide[query.device] = _hiding(query.device)
        length, hide_the_unwritten = self._hide[query.device]
        length.fill_(cache.held)
        if self._compiled is None:
            self._compiled = _compile()
        with _compiling_often():
            out: Tensor = self._compiled(
                query, key, value, score_mod=hide_the_unwritten, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
            )
        return out


def _compile() -> Callable[..., Tensor]:
    """flex_attention, compiled for fixed shapes. Raises RuntimeError if torch does not compile in this process."""
    from torch import _dynamo
    from torch.nn.attention.flex_attention import flex_attention

    if _dynamo.config.disable:
        raise RuntimeError("torch.compile is turned off (TORCH_COMPILE_DISABLE), so it would not be fused")
    # With fullgraph, torch raises an error at its limit instead of calling the function itself.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _compiling_often() -> AbstractContextManager[object]:
    """A higher limit of the number of times that torch compiles one function."""
    config: Any = torch._dynamo.config
    patched: AbstractContextManager[object] = config.patch(
        recompile_limit=_MOST_COMPILED, accumulated_recompile_limit=_MOST_COMPILED
    )
    return patched


def _hiding(device: torch.device) -> tuple[Tensor, Callable[..., Tensor]]:
    length = torch.zeros((), dtype=torch.int32, device=device)

    def hide_the_unwritten(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(kv < length, score, -float("inf"))

    return length, hide_the_unwritten
