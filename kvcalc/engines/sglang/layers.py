"""The pool of each of a model's caches, and the bytes one token takes in it.

Source: kv_cache_configurator.py (calculate_mla_kv_cache_dim), memory_pool.py, swa_memory_pool.py and mamba_utils.py,
SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.declarations import types_of
from kvcalc.engines.place import RAW_FP8
from kvcalc.engines.sglang.models import GEMMA4, MINIMAX_M3, check_model
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.memory.sharding import whole_of
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, is_sparse
from kvcalc.records import NamedTuple

FULL, WINDOW, STATE = "full", "window", "state"

_DTYPES = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
_SPARSE_DTYPES = ("bf16", "fp8", RAW_FP8.name)
_M3_DTYPES = ("fp16", "bf16")
# Types whose states are inputs of convolutions around attention.
_CONVOLVED = ("inkling_text", "zaya")
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Layer(NamedTuple):
    """One cache of `num_layers` layers: its pool, and the bytes of one token or of one state.

    `stores` is False if the pool has rows for these layers but they keep nothing of their own.
    """

    cache: Cache
    num_layers: int
    pool: str
    bytes: int
    stores: bool = True


@remembered
def layers_of(share: ModelSpec, dtype: Dtype) -> list[Layer]:
    """The distinct caches of one device's share, with the number of layers that have each.

    Raises ModelError (exit 3) for a layout that is not modelled, and UsageError (exit 2) for a dtype that SGLang does
    not support for this cache.
    """
    spec = whole_of(share)
    check_model(spec)
    known = _SPARSE_DTYPES if is_sparse(spec) else _M3_DTYPES if spec.model_type in MINIMAX_M3 else _DTYPES
    if dtype.name not in known:
        # MiniMax-M3's index keys are in fp8 only on Hopper (get_minimax_sparse_index_dtype).
        raise UsageError(f"--kv-dtype {dtype.name}: not modelled for {spec.model_type} in SGLang",
                         f"one of {', '.join(known)}")  # fmt: skip
    layers = [_layer(spec, cache, num_layers, dtype) for cache, num_layers in distinct_caches(share)]
    return layers + [
        _layer(spec, cache, count, dtype)._replace(stores=False) for cache, count in _rows_without_a_cache(share)
    ]


def encoder_tokens(spec: ModelSpec) -> int:
    """The encoder's tokens, which come before the decoder's in the same table. 0 if there is no encoder."""
    return max(
        (cache.encoder_tokens or 0 for cache in all_caches(spec) if isinstance(cache, CrossAttention)), default=0
    )


def _rows_without_a_cache(share: ModelSpec) -> list[tuple[Cache, int]]:
    """Caches for which a pool has unused rows, with the number of layers.

    Gemma's shared layers and Nemotron-NAS' layers without attention have buffers like any other layer (layer_num of
    _build_mha_kv_pool, layer_types of get_hybrid_layer_ids). Whisper has additional buffers for as many layers as the
    encoder has (_derive_model_shapes). They are counted on the first pipeline stage.
    """
    spec = whole_of(share)
    if spec.model_type not in types_of("sglang", "all_layers"):
        return []
    caches = all_caches(spec)
    if spec.model_type == "whisper":
        stated = spec.stated.get("encoder_layers")
        if not isinstance(stated, int):
            raise ModelError(f"{spec.name}: encoder_layers is missing")
        is_first = share.layers[0].first == 0
        return [(next(cache for cache in caches if isinstance(cache, FullAttention)), stated)] if is_first else []
    empty = [group for group in share.layers if not group.caches]
    count = sum(group.num_layers for group in empty)
    if not count:
        return []
    if spec.model_type not in GEMMA4:
        return [(caches[0], count)]
    # A layer that shares an earlier layer's cache has that layer's window.
    windowed = sum(group.num_layers for group in empty if any(mixer.window for mixer in group.layer.attention))
    kinds = ((SlidingWindowAttention, windowed), (FullAttention, count - windowed))
    return [(next(cache for cache in caches if isinstance(cache, kind)), rows) for kind, rows in kinds if rows]


def _layer(spec: ModelSpec, cache: Cache, num_layers: int, dtype: Dtype) -> Layer:
    if isinstance(cache, RecurrentState):
        return Layer(cache, num_layers, STATE, _state_bytes(spec, cache))
    if isinstance(cache, IndexerKeys):
        if spec.model_type in MINIMAX_M3:
            return Layer(cache, num_layers, FULL, _m3_index_bytes(spec, cache, dtype))
        # Always in fp8, with an fp32 scale per 128 elements (DSATokenToKVPool).
        return Layer(cache, num_layers, FULL, cache.head_dim + cache.head_dim // 128 * 4)
    has_window = isinstance(cache, (*HEADS_CACHES, LatentAttention)) and cache.window is not None
    if isinstance(cache, LatentAttention) and is_sparse(spec) and dtype.name == "fp8" and not has_window:
        # The latent is in fp8 with an fp32 scale per 128 elements. The rotary key has 16 bits.
        rank = cache.kv_lora_rank
        return Layer(cache, num_layers, FULL, rank + rank // 128 * 4 + 2 * cache.qk_rope_head_dim)
    if isinstance(cache, CrossAttention):
        cache_of_tokens = FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
        return Layer(cache, num_layers, FULL, stored_cache_bytes(cache_of_tokens, 1, dtype))
    pool = WINDOW if has_window and spec.model_type in types_of("sglang", "window_pool") else FULL
    return Layer(cache, num_layers, pool, stored_cache_bytes(cache, 1, dtype))


def _m3_index_bytes(spec: ModelSpec, cache: IndexerKeys, dtype: Dtype) -> int:
    """Bytes of an index key, which is in the model's dtype.

    SGLang also keeps a value unless sparse_disable_index_value is set (MiniMaxSparseKVPool). Only the setting in the
    published configs is modelled: the value is disabled in every layer with an indexer.
    """
    stated = spec.stated.get("sparse_attention_config")
    nested = stated if isinstance(stated, Mapping) else {}
    frequency, disabled = nested.get("sparse_attention_freq"), nested.get("sparse_disable_index_value")
    if (
        not isinstance(frequency, list)
        or not isinstance(disabled, list)
        or [*map(bool, frequency)] != [*map(bool, disabled)]
    ):
        raise ModelError(f"{spec.name}: SGLang's layout of indexers with values (sparse_disable_index_value) is not "
                         "established")  # fmt: skip
    return bytes_of(cache.head_dim, dtype)


def _state_bytes(spec: ModelSpec, cache: RecurrentState) -> int:
    """Bytes of the convolution's inputs and the state (mamba2_state_dtype).

    The inputs are always in bf16. The state is in the config's mamba_ssm_dtype, or in fp32 if it has none.
    """
    if spec.model_type in _CONVOLVED:
        return bytes_of(_convolved_inputs(spec, cache), DTYPES["bf16"])
    state = DTYPES[_STATE_DTYPES.get(spec.state_dtype or "", "fp32")]
    inputs = bytes_of(cache.conv_channels * (cache.conv_kernel - 1), DTYPES["bf16"])
    return inputs + bytes_of(cache.state_elements, state)


def _convolved_inputs(spec: ModelSpec, cache: RecurrentState) -> int:
    """The inputs of the convolutions around one layer's attention. `spec` is one device's.

    ZAYA keeps those of queries and keys, and the last hidden state, whole on each device (ZayaConfig of
    configs/zaya.py). A layer of Inkling has room for the keys and values of both kinds of layers, and for two
    convolutions of hidden states, whole on each device (InklingModelConfig of configs/inkling.py).
    """
    columns, width = cache.conv_kernel - 1, spec.attention.hidden_size or 0
    if spec.model_type == "zaya":
        return cache.conv_channels * columns + width
    kinds = {
        type(mixer): sum(mixer.token_rows()) for mixer, _ in distinct_caches(spec) if isinstance(mixer, HEADS_CACHES)
    }
    if len(kinds) < 2:
        raise ModelError(f"{spec.name}: SGLang's layout of Inkling with one kind of layers is not established")
    return columns * (sum(kinds.values()) + 2 * width)
