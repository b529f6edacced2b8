"""What of a model llama.cpp keeps: for each of its caches the rows a cell has.

Source: src/models, src/llama-model.cpp (create_memory) and conversion of llama.cpp, as they stand in llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import ModelError
from kvcalc.memory.engines import not_established
from kvcalc.memory.engines.llama_cpp.converted import keeps_windows
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

# Chunks are not read from the file: always 8,192 (models/llama4.cpp).
_CHUNK = 8192

# n_layer_kv_from_start is not read from the file (models/gemma3n.cpp).
_GEMMA3N_OWN = 20

_T5 = ("mt5", "t5", "umt5")
_M3 = ("minimax_m3", "minimax_m3_vl_text")


class Layer(NamedTuple):
    """A cache of `num_layers` layers, and what llama.cpp keeps for it: the same, but where a type is laid out
    otherwise."""

    cache: Cache
    kept: Cache
    num_layers: int

    @property
    def has_heads(self) -> bool:
        """Whether its V is among those padded to one width; an indexer's stand in a cache of their own."""
        return isinstance(self.kept, HEADS_CACHES) and not isinstance(self.cache, IndexerKeys)

    @property
    def v_row(self) -> int:
        """Elements of its row of V, where that is among them; else 0."""
        return self.kept.token_rows()[1] if self.has_heads else 0


class Layers(NamedTuple):
    """Every cache with the number of layers that have it. `window` is the one window llama.cpp keeps, or None.

    `widest_v`: elements of the widest row of V, to which all are padded where V is transposed. `not_kept`: caches the
    model has and llama.cpp does without.
    """

    caches: tuple[Layer, ...]
    window: int | None
    widest_v: int
    not_kept: tuple[Layer, ...] = ()

    def only(self, cache: Cache) -> Layers:
        """One layer with this cache alone."""
        return self._in_layers([(cache, 1)])

    def held_by(self, stage: ModelSpec) -> Layers:
        """The caches of a pipeline stage's layers; the window and the widest row stay the whole model's."""
        return self._in_layers(distinct_caches(stage))

    def _in_layers(self, caches: list[tuple[Cache, int]]) -> Layers:
        counts = {(type(cache), cache): count for cache, count in caches}

        def held(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
            found = ((layer, counts.get((type(layer.cache), layer.cache), 0)) for layer in layers)
            return tuple(layer._replace(num_layers=count) for layer, count in found if count)

        return self._replace(caches=held(self.caches), not_kept=held(self.not_kept))

    def is_windowed(self, cache: Cache) -> bool:
        """Whether the cache stands among the windows."""
        return self.window is not None and cache.window is not None


@remembered
def layers_of(spec: ModelSpec, settings: Settings) -> Layers:
    """The caches of a model. Raises ModelError (exit 3) for a model whose layout is not established."""
    if spec.whole is not None:
        return layers_of(spec.whole, settings).held_by(spec)
    has_window_cache = keeps_windows(spec) and not settings.is_before(WINDOWS)
    _check_file(spec)
    every = tuple(Layer(cache, _kept(spec, cache, settings), num_layers) for cache, num_layers in distinct_caches(spec))
    # T5 makes K and V of the encoder's output anew at every step (models/t5.cpp).
    not_kept = tuple(layer for layer in every if spec.model_type in _T5 and isinstance(layer.cache, CrossAttention))
    layers = tuple(layer for layer in every if layer not in not_kept)
    if not layers:
        raise ModelError(f"{spec.name}: llama.cpp keeps no cache for it")
    for cache, _, _ in layers:
        if isinstance(cache, (CompressedAttention, CrossAttention)):
            raise not_established(spec, "llama.cpp", cache.kind)
        if isinstance(cache, ChunkedAttention) and cache.chunk != _CHUNK:
            raise ModelError(f"{spec.name}: llama.cpp has chunks of {_CHUNK:,} tokens, not of {cache.chunk:,}")
        if isinstance(cache, IndexerKeys) and settings.before_pull is not None:
            raise not_established(spec, "llama.cpp", "sparse attention in older builds")
    windows = {layer.cache.window for layer in layers if layer.cache.window is not None}
    if len(windows) > 1:
        raise ModelError(f"{spec.name}: llama.cpp has one window for all layers, the model {len(windows)}")
    window = _written_window(spec, max(windows)) if has_window_cache and windows else None
    return Layers(layers, window, max(layer.v_row for layer in layers), not_kept)


def _kept(spec: ModelSpec, cache: Cache, settings: Settings) -> Cache:
    """Older builds keep K and V of every head for MLA, or the latent twice: with the rotary key as K, and as V.

    For an older GGUF file every build keeps the heads. MiniCPM3 is expanded to its heads still (models/minicpm3.cpp).
    MiniMax-M3's indexer has a cache like any other, of one head and with a V nothing is written to
    (llama-kv-cache-msa.cpp).
    """
    shape = spec.attention
    if isinstance(cache, IndexerKeys) and spec.model_type in _M3:
        return FullAttention(1, cache.head_dim, shape.v_head_dim)
    if not isinstance(cache, LatentAttention):
        return cache
    expands = spec.model_type == "minicpm3" or (spec.gguf is not None and spec.gguf.expands_latent)
    if expands or settings.is_before(LATENT):
        return FullAttention(shape.num_heads, shape.qk_head_dim, shape.v_head_dim)
    if settings.is_before(NO_V):
        return FullAttention(1, cache.kv_lora_rank + cache.qk_rope_head_dim, cache.kv_lora_rank)
    return cache


def _written_window(spec: ModelSpec, window: int) -> int:
    """MiMo-V2's file has the config's sliding_window, the current token included (conversion/mimo.py)."""
    written = spec.stated.get("sliding_window")
    return written if spec.model_type == "mimo_v2_flash" and isinstance(written, int) else window


def _check_file(spec: ModelSpec) -> None:
    """Refuse, with a ModelError, a model whose file would say something else of its cache than its config does. A GGUF
    file speaks for itself."""
    if spec.gguf is not None:
        return
    config, shape, kind = spec.stated, spec.attention, spec.model_type
    problem = None
    if kind == "gpt_bigcode" and shape.num_kv_heads != 1:
        problem = "writes one KV head for gpt_bigcode, the model has more"  # conversion/starcoder.py
    elif kind == "chatglm" and config.get("multi_query_group_num", shape.num_kv_heads) != shape.num_kv_heads:
        problem = "takes multi_query_group_num whatever multi_query_attention says"  # conversion/chatglm.py
    elif kind == "minicpm3" and (
        config.get("num_key_value_heads", shape.num_heads) != shape.num_heads
        or shape.num_heads * shape.v_head_dim != shape.hidden_size
    ):
        problem = "has V of hidden_size / num_attention_heads in every head of minicpm3"  # conversion/minicpm.py
    elif kind in _T5 and config.get("num_layers", spec.num_layers) != spec.num_layers:
        problem = "has as many caches as the encoder has layers, the decoder another number"  # models/t5.cpp
    elif kind == "gemma3n_text" and sum(group.num_layers for group in spec.layers if group.caches) != _GEMMA3N_OWN:
        problem = f"has caches for the first {_GEMMA3N_OWN} layers of gemma3n, the model for others"
    elif kind in _M3 and _leading_dense(spec) is None:
        problem = "has an indexer in all layers after the dense ones in front, the model elsewhere"
    if problem:
        raise ModelError(f"{spec.name}: llama.cpp {problem}")


def _leading_dense(spec: ModelSpec) -> int | None:
    """Layers in front without experts, which are those without an indexer; None where they are not the same
    (MiniMaxM3Model of conversion/minimax.py and LLM_ARCH_MINIMAX_M3 of create_memory)."""
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
