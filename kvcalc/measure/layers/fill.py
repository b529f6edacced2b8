"""Fill the caches with random rows, through the caches' own methods, as if a prompt had been run."""

from __future__ import annotations

import torch

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.recurrent import RecurrentMixer
from kvcalc.measure.layers.stack import Report, Request, Stack

# The rows that are drawn at once, in bytes.
CHUNK_BYTES = 64 << 20


def fill_caches(stack: Stack, request: Request, progress: Report) -> None:
    """Fill every cache with all tokens except those of the timed steps.

    Every row is different, so that a kernel that reads other rows, or fewer, gives another result. The rows continue
    torch's random stream. An encoder's K and V exist already. A recurrent state gets random values. Rows that would
    slide out of a window are not drawn.
    """
    tokens = request.context_tokens - request.steps
    for number, (layer, cache) in enumerate(zip(stack.layers, stack.caches)):
        progress("fill the cache", number, len(stack.caches))
        if not isinstance(cache, TokenCache) or isinstance(layer, RecurrentMixer):
            for tensor in cache.tensors:
                tensor.normal_()
            cache.length = tokens
        elif not cache.length:
            shapes = layer.cache_shapes()
            for each in cache.each():
                end = each.max_tokens - request.steps
                row_bytes = each.batch_size * sum(heads * width for heads, width in shapes) * 4
                chunk = end if each.layout == "growing" else max(1, CHUNK_BYTES // row_bytes)
                each.length = max(0, end - each.capacity)
                while each.length < end:
                    new = min(chunk, end - each.length)
                    each.append(
                        tuple(
                            torch.empty(
                                each.batch_size, heads, new, width, dtype=request.torch_dtype, device=request.device
                            ).normal_()
                            for heads, width in shapes
                        )
                    )
            cache.length = tokens
    progress("fill the cache", len(stack.caches), len(stack.caches))
