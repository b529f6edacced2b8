"""What of a model llama.cpp keeps: which types it runs, and which of their windows its cache knows of.

Source: src/models and conversion of llama.cpp, as they stand in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import ModelError
from kvcalc.memory.engines.llama_cpp.settings import LATENT, NO_V, WINDOWS, Settings
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    ChunkedAttention,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
)
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, distinct_caches

# A second cache for windows (swa_type). Other types' windows are not kept as such: every token has its cell.
_WINDOWED = ("cohere2", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text",
             "mimo_v2_flash", "olmo3")  # fmt: skip
_FULL_LENGTH = ("ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "starcoder2")

# Chunks are not read from the file: always 8,192 (models/llama4.cpp).
_CHUNK = 8192

_PLAIN = (
    "apertus arcee bamba bloom cohere deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 falcon falcon_h1 falcon_mamba "
    "gemma generic glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_neox granite granitemoe granitemoehybrid "
    "hunyuan_v1_dense hunyuan_v1_moe jamba kimi_k2 kimi_linear lfm2 lfm2_moe llama llava mamba mamba2 minimax_m2 "
    "nemotron_h nemotron-nas olmo olmo2 olmoe phi qwen2_5_vl_text qwen2_vl_text qwen3_5_moe_text qwen3_5_text "
    "qwen3_next qwen3_vl_moe_text qwen3_vl_text rwkv6 seed_oss stablelm"
).split()


class Layer(NamedTuple):
    """A cache of `num_layers` layers, and what llama.cpp keeps for it: the same, but for MLA in older builds."""

    cache: Cache
    kept: Cache
    num_layers: int


class Layers(NamedTuple):
    """Every cache with the number of layers that have it. `window` is the one window llama.cpp keeps, or None.

    `widest_v`: elements of the widest row of V, to which all are padded where V is transposed.
    """

    caches: tuple[Layer, ...]
    window: int | None
    widest_v: int

    def only(self, cache: Cache) -> Layers:
        """One layer with this cache alone."""
        layer = next(layer for layer in self.caches if (type(layer.cache), layer.cache) == (type(cache), cache))
        return self._replace(caches=(layer._replace(num_layers=1),))

    def is_windowed(self, cache: Cache) -> bool:
        """Whether the cache stands among the windows."""
        return self.window is not None and cache.window is not None


@remembered
def layers_of(spec: ModelSpec, settings: Settings) -> Layers:
    """The caches of a model. Raises ModelError (exit 3) for a model whose layout is not established."""
    if spec.model_type not in (*_WINDOWED, *_FULL_LENGTH, *_PLAIN):
        raise ModelError(f"{spec.name}: llama.cpp's layout of {spec.model_type} is not established")
    layers = tuple(
        Layer(cache, _kept(spec, cache, settings), num_layers) for cache, num_layers in distinct_caches(spec)
    )
    if not layers:
        raise ModelError(f"{spec.name}: llama.cpp keeps no cache for it")
    for cache, _, _ in layers:
        if isinstance(cache, (CompressedAttention, CrossAttention)):
            raise ModelError(f"{spec.name}: llama.cpp's layout of {cache.kind.replace('_', ' ')} is not established")
        if isinstance(cache, ChunkedAttention) and cache.chunk != _CHUNK:
            raise ModelError(f"{spec.name}: llama.cpp has chunks of {_CHUNK:,} tokens, not of {cache.chunk:,}")
        if isinstance(cache, IndexerKeys) and settings.before_pull is not None:
            raise ModelError(f"{spec.name}: llama.cpp's layout of sparse attention in older builds is not established")
    windows = {layer.cache.window for layer in layers if layer.cache.window is not None}
    if windows and spec.model_type in _PLAIN:
        raise ModelError(f"{spec.name}: llama.cpp's layout of {spec.model_type} with windows is not established")
    if len(windows) > 1:
        raise ModelError(f"{spec.name}: llama.cpp has one window for all layers, the model {len(windows)}")
    widths = (kept.num_kv_heads * kept.v_head_dim for _, kept, _ in layers if isinstance(kept, HEADS_CACHES))
    keeps_windows = windows and spec.model_type in _WINDOWED and not settings.is_before(WINDOWS)
    return Layers(layers, max(windows) if keeps_windows else None, max(widths, default=0))


def _kept(spec: ModelSpec, cache: Cache, settings: Settings) -> Cache:
    """Older builds keep K and V of every head for MLA, or the latent twice: with the rotary key as K, and as V."""
    if not isinstance(cache, LatentAttention) or not settings.is_before(NO_V):
        return cache
    rank, shape = cache.kv_lora_rank, spec.attention
    if settings.is_before(LATENT):
        return FullAttention(shape.num_heads, shape.qk_head_dim, shape.v_head_dim)
    return FullAttention(1, rank + cache.qk_rope_head_dim, rank)
