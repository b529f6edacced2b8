"""The part of a decode step between the projections and attention: rotate the query and the key, and cache the row.

On a GPU one Triton kernel does this, in place of about 20 small operations, whose launches would take longer than the
step's work.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.rope import RotaryEmbedding


def rotate_and_append(
    rope: RotaryEmbedding | None, query: Tensor, key: Tensor, cache: TokenCache, *, value: Tensor | None = None,
    front: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate `query` and `key` (batch, heads, 1, width) to the next position, and append the token's row to `cache`.

    The row is the key and `value`, or in MLA one tensor of `front` and the key. Returns the rotated query.
    """
    kernel = _kernel(query.device) if query.device.type == "cuda" and cache.layout != "growing" else None
    if kernel is not None and kernel.can_store(cache):
        with suppress(kernel.TritonError):  # it does not compile for this shape
            rotated: Tensor = kernel.rotate_and_append(rope, query, key, cache, value, front)
            return rotated
    start = cache.length
    if rope is not None:
        query, key = rope(query, start, cache.behind), rope(key, start, cache.behind)
    row = key if front is None else torch.cat((front, key), dim=-1)
    cache.append((row,) if value is None else (row, value))
    return query


@lru_cache
def _kernel(device: torch.device) -> Any:
    """The module of the Triton kernel, or None if it does not run here, or not as the operations do."""
    try:
        kernel = import_module("kvcalc.attention.fused_step")
        return kernel if kernel.is_right(device) else None
    except Exception:
        # No Triton, no C compiler for its launcher, a device that it does not know: the operations do the same.
        return None
