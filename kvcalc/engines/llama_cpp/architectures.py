"""How llama.cpp lays out each of a model's caches: the rows that one cell holds.

Source: src/models, src/llama-model.cpp (create_memory) and conversion/ of llama.cpp, in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kvcalc.engines.declarations import table, types_of
from kvcalc.engines.engine import not_established
from kvcalc.engines.llama_cpp.settings import LATENT, NO_V, WINDOWS, Settings
from kvcalc.errors import ModelError
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    ChunkedAttention,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.families.decoder_table import row
from kvcalc.model.families.window_patterns import pattern_of
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, distinct_caches
from kvcalc.records import NamedTuple

# The chunk length is not read from the file; it is always 8,192 (models/llama4.cpp).
_CHUNK = 8192

# n_layer_kv_from_start is not read from the file (models/gemma3n.cpp).
_GEMMA3N_OWN = 20

# EXAONE 4 keeps windows only in the model with 64 layers (models/exaone4.cpp).
_EXAONE4_LAYERS = 64

_T5 = ("mt5", "t5", "umt5")
_M3 = ("minimax_m3", "minimax_m3_vl_text")


class Layer(NamedTuple):
    """A cache of `num_layers` layers. `kept` is the cache that llama.cpp keeps for it, usually the same one."""

    cache: Cache
    kept: Cache
    num_layers: int

    @property
    def has_heads(self) -> bool:
        """Whether its V is padded to the widest V. An indexer has a separate cache and is not padded."""
        return isinstance(self.kept, HEADS_CACHES) and not isinstance(self.cache, IndexerKeys)

    @property
    def v_row(self) -> int:
        """The number of elements in its row of V if the row is padded to the widest, else 0."""
        return self.kept.token_rows()[1] if self.has_heads else 0


class Layers(NamedTuple):
    """Every cache with the number of layers that have it. `window` is the window that llama.cpp keeps, or None.

    `widest_v` is the number of elements in the widest row of V. If V is transposed, all rows are padded to it.
    `not_kept` has the model's caches that llama.cpp does not keep.
    """

    caches: tuple[Layer, ...]
    window: int | None
    widest_v: int
    not_kept: tuple[Layer, ...] = ()

    def only(self, cache: Cache) -> Layers:
        """A single layer with only this cache."""
        return self._in_layers([(cache, 1)])

    def held_by(self, stage: ModelSpec) -> Layers:
        """The caches of a pipeline stage's layers. The window and the widest row are still those of the whole model."""
        return self._in_layers(distinct_caches(stage))

    def _in_layers(self, caches: list[tuple[Cache, int]]) -> Layers:
        counts = {(type(cache), cache): count for cache, count in caches}

        def held(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
            counted = ((layer, counts.get((type(layer.cache), layer.cache), 0)) for layer in layers)
            return tuple(layer._replace(num_layers=count) for layer, count in counted if count)

        return self._replace(caches=held(self.caches), not_kept=held(self.not_kept))

    def is_windowed(self, cache: Cache) -> bool:
        """Whether llama.cpp keeps only a window of this cache."""
        return self.window is not None and cache.window is not None


@remembered
def layers_of(spec: ModelSpec, settings: Settings) -> Layers:
    """The caches of a model. Raises ModelError (exit 3) for a model whose layout is not modelled."""
    if spec.whole is not None:
        return layers_of(spec.whole, settings).held_by(spec)
    has_window_cache = _keeps_windows(spec) and not settings.is_before(WINDOWS)
    _check_file(spec)
    every = tuple(Layer(cache, _kept(spec, cache, settings), num_layers) for cache, num_layers in distinct_caches(spec))
    not_kept = tuple(layer for layer in every if _is_elsewhere(spec, layer.cache))
    layers = tuple(layer for layer in every if layer not in not_kept)
    if not layers:
        raise ModelError(f"{spec.name}: llama.cpp keeps no cache for it")
    for cache, _, _ in layers:
        if isinstance(cache, (CompressedAttention, CrossAttention)):
            raise not_established(spec, "llama.cpp", cache.kind)
        if isinstance(cache, ChunkedAttention) and cache.chunk != _CHUNK:
            raise ModelError(f"{spec.name}: llama.cpp uses chunks of {_CHUNK:,} tokens; the model has {cache.chunk:,}")
        if isinstance(cache, IndexerKeys) and settings.before_pull is not None:
            raise not_established(spec, "llama.cpp", "sparse attention in older builds")
    windows = {layer.cache.window for layer in layers if layer.cache.window is not None}
    if len(windows) > 1:
        raise ModelError(f"{spec.name}: llama.cpp has one window for all layers; the model has {len(windows)}")
    window = _written_window(spec, max(windows)) if has_window_cache and windows else None
    return Layers(layers, window, max(layer.v_row for layer in layers), not_kept)


def _keeps_windows(spec: ModelSpec) -> bool:
    """Whether windows have a separate cache (`models.yaml`).

    Raises ModelError (exit 3) for a type that llama.cpp does not convert, for windows that are not modelled, and if
    the model has windows in more or fewer layers than llama.cpp's architecture.
    """
    kind = spec.model_type
    windowed = [
        any(cache.window is not None for cache in group.caches)
        for group in spec.layers
        for _ in range(group.num_layers)
    ]
    if kind == "exaone4":
        return spec.num_layers == _EXAONE4_LAYERS and any(windowed)
    if kind in types_of("llama.cpp", "not_converted"):
        raise ModelError(f"{spec.name}: llama.cpp does not convert {kind}", "count with --engine logical")
    fixed, types = table("llama.cpp", "models")["fixed"], partial(types_of, "llama.cpp")
    if kind not in types("listed").union(fixed, *map(types, ("ruled", "full_length", "plain"))):
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} is not modelled")
    if not any(windowed):
        return False
    if kind in types("plain"):
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} with windows is not modelled")
    pattern: Any = pattern_of(fixed[kind]) if kind in fixed else row(kind)["slides"] if kind in types("ruled") else None
    # The bytes depend on how many layers have windows, not on which. A GGUF file is already read by the same rule.
    if pattern and spec.gguf is None and sum(windowed) != sum(pattern.sliding(len(windowed))):
        which = "first" if pattern.full_first else "last"
        raise ModelError(
            f"{spec.name}: llama.cpp's {kind} has full attention in the {which} of every {pattern.step} layers and "
            f"ignores the config; the model has {sum(windowed)} layers with windows"
        )
    return pattern is not None or kind in types("listed")


def _is_elsewhere(spec: ModelSpec, cache: Cache) -> bool:
    """Whether a cache of the model is not in llama.cpp's memory.

    T5 recomputes K and V of the encoder's output at every step (models/t5.cpp). The numbers of the last tokens, from
    which Qwen4-Exp makes its n-grams, are with the cells (models/qwen4exp.cpp).
    """
    if isinstance(cache, RecurrentState):
        return spec.model_type == "qwen4_exp_text" and not cache.conv_channels and cache.state_dtype == "fp32"
    return spec.model_type in _T5 and isinstance(cache, CrossAttention)


def _kept(spec: ModelSpec, cache: Cache, settings: Settings) -> Cache:
    """The cache that llama.cpp keeps for `cache`.

    - For MLA, older builds keep K and V of every head, or the latent twice: with the rotary key as K, and as V.
    - For an older GGUF file of an MLA model, every build keeps K and V of every head.
    - MiniCPM3 is still expanded to its heads (models/minicpm3.cpp).
    - MiniMax-M3's indexer has a normal cache with one head, and a V that is never written (llama-kv-cache-msa.cpp).
    - GLM-5-Next's indexer keeps key, gate and pooled key of every token (llama-memory-hybrid-idx.cpp).
    """
    shape = spec.attention
    if isinstance(cache, IndexerKeys) and spec.model_type in _M3:
        return FullAttention(1, cache.head_dim, shape.v_head_dim)
    if isinstance(cache, IndexerKeys) and spec.model_type == "glm5_next_text":
        return IndexerKeys(3 * (cache.head_dim // 2))  # the model keeps key, gate and a flag
    if not isinstance(cache, LatentAttention):
        return cache
    if spec.model_type == "minicpm3" or spec.expands_latent or settings.is_before(LATENT):
        return FullAttention(shape.num_heads, shape.qk_head_dim, shape.v_head_dim)
    if settings.is_before(NO_V):
        return FullAttention(1, cache.kv_lora_rank + cache.qk_rope_head_dim, cache.kv_lora_rank)
    return cache


def _written_window(spec: ModelSpec, window: int) -> int:
    """The window in the GGUF file.

    For MiMo-V2 this is the config's sliding_window, which includes the current token (conversion/mimo.py).
    """
    written = spec.stated.get("sliding_window")
    return written if spec.model_type == "mimo_v2_flash" and isinstance(written, int) else window


def _check_file(spec: ModelSpec) -> None:
    """Raise ModelError if the converted GGUF file would describe a different cache than the config.

    A model read from a GGUF file needs no check.
    """
    if spec.gguf is not None:
        return
    config, shape, kind = spec.stated, spec.attention, spec.model_type
    problem = None
    if kind == "gpt_bigcode" and shape.num_kv_heads != 1:
        problem = "writes one KV head for gpt_bigcode; the model has more"  # conversion/starcoder.py
    elif kind == "chatglm" and config.get("multi_query_group_num", shape.num_kv_heads) != shape.num_kv_heads:
        problem = "uses multi_query_group_num and ignores multi_query_attention"  # conversion/chatglm.py
    elif kind == "minicpm3" and (
        config.get("num_key_value_heads", shape.num_heads) != shape.num_heads
        or shape.num_heads * shape.v_head_dim != shape.hidden_size
    ):
        problem = "assumes V of hidden_size / num_attention_heads in every head of minicpm3"  # conversion/minicpm.py
    elif kind in _T5 and config.get("num_layers", spec.num_layers) != spec.num_layers:
        problem = "uses the encoder's number of layers; the decoder has a different number"  # models/t5.cpp
    elif kind == "gemma3n_text" and sum(group.num_layers for group in spec.layers if group.caches) != _GEMMA3N_OWN:
        problem = f"keeps caches for the first {_GEMMA3N_OWN} layers of gemma3n; the model has them in other layers"
    elif kind in _M3 and _leading_dense(spec) is None:
        problem = "expects an indexer in every layer after the leading dense layers; the model differs"
    if problem:
        raise ModelError(f"{spec.name}: llama.cpp {problem}")


def _leading_dense(spec: ModelSpec) -> int | None:
    """The number of leading layers without experts, or None if these are not exactly the layers without an indexer.

    Source: MiniMaxM3Model of conversion/minimax.py and LLM_ARCH_MINIMAX_M3 of create_memory.
    """
    frequency = spec.stated.get("moe_layer_freq")
    if not isinstance(frequency, list):
        return None
    dense = next((number for number, experts in enumerate(frequency) if experts), len(frequency))
    indexed = [
        any(isinstance(cache, IndexerKeys) for cache in group.caches)
        for group in spec.layers
        for _ in range(group.num_layers)
    ]
    return dense if indexed == [number >= dense for number in range(len(indexed))] else None
