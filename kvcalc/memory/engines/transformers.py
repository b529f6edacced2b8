"""Hugging Face Transformers' DynamicCache: what the tensors of `past_key_values` hold after so many tokens.

Source: cache_utils.py of Transformers 5.23.0, and bytes counted on the meta device.
"""

from __future__ import annotations

from kvcalc.memory.engines import Engine
from kvcalc.model.caches import Cache, FullAttention, stored_elements
from kvcalc.model.spec import ModelSpec

VERSION = "5.23.0"


def engine(spec: ModelSpec) -> Engine:
    """The dynamic cache's accounting.

    - A windowed layer keeps the last window - 1 tokens: the next token's own row completes the window
      (DynamicSlidingWindowLayer.update). With a window of 1 the slice from minus zero keeps every token.
    - Falcon's new architecture repeats K and V over all query heads before the cache (FalconAttention._split_heads).
    - MLA is kept as the latent and the rotary key, as the formula has it.
    """

    def held_elements(cache: Cache, tokens: int) -> int:
        if cache.window is not None and cache.window > 1:
            tokens = min(tokens, cache.window - 1)
        if spec.model_type == "falcon" and isinstance(cache, FullAttention) and cache.num_kv_heads > 1:
            cache = cache._replace(num_kv_heads=spec.attention.num_heads)
        if cache.window == 1:
            cache = cache._replace(window=tokens)
        return stored_elements(cache, tokens)

    return Engine("transformers", VERSION, held_elements, {"cache": "dynamic"})
