"""Which pool each of a model's caches is in, and what one token of it takes.

Source: model_config.py (is_hybrid_swa_model), kv_cache_configurator.py (calculate_mla_kv_cache_dim) and
mamba_utils.py, SGLang 0.5.23.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CompressedAttention,
    CrossAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches

FULL, WINDOW, STATE = "full", "window", "state"

# Types whose windows have a pool of their own; elsewhere windows are kept whole.
_WINDOW_POOL = ("gemma4_text", "gpt_oss", "llama4_text", "mimo_v2_flash")

_KNOWN = (
    "apertus arcee cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 falcon_h1 gemma gemma2 gemma3_text "
    "generic glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 granite granitemoe granitemoehybrid hunyuan_v1_dense "
    "hunyuan_v1_moe kimi_k2 kimi_linear lfm2 lfm2_moe llama llava longcat_flash mimo minicpm3 minimax_m2 ministral3 "
    "mistral mixtral nemotron_h olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_vl_text qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text stablelm starcoder2"
).split()

_DTYPES = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
_SPARSE_DTYPES = ("bf16", "fp8")
_STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Layer(NamedTuple):
    """One cache of `num_layers` layers: its pool, and the bytes of a token, or of a state."""

    cache: Cache
    num_layers: int
    pool: str
    bytes: int


def is_sparse(spec: ModelSpec) -> bool:
    """Whether an indexer stands beside MLA (DeepSeek sparse attention)."""
    return any(isinstance(cache, IndexerKeys) for cache in all_caches(spec))


@remembered
def layers_of(spec: ModelSpec, dtype: Dtype) -> list[Layer]:
    """Every cache of one device's share once, and in how many layers it stands.

    Raises ModelError (exit 3) for a layout that is not established, UsageError (exit 2) for a dtype SGLang does not
    keep this cache in.
    """
    check_model(spec)
    known = _SPARSE_DTYPES if is_sparse(spec) else _DTYPES
    if dtype.name not in known:
        raise UsageError(f"--kv-dtype {dtype.name}: not a cache dtype of SGLang for {spec.model_type}",
                         f"one of {', '.join(known)}")  # fmt: skip
    return [_layer(spec, cache, num_layers, dtype) for cache, num_layers in distinct_caches(spec)]


@remembered
def check_model(spec: ModelSpec) -> None:
    """Refuse, with a ModelError, what SGLang's pools are not established for."""
    caches = all_caches(spec)
    keeps_tokens = any(not isinstance(cache, RecurrentState) for cache in caches)
    shares = spec.model_type == "gemma4_text" and any(not group.caches for group in spec.layers)
    if spec.model_type not in (*_KNOWN, *_WINDOW_POOL) or not keeps_tokens or shares:
        what = "shared layers" if shares else spec.model_type
        raise ModelError(f"{spec.name}: SGLang's layout of {what} is not established")
    for cache in caches:
        if isinstance(cache, (CompressedAttention, CrossAttention)) or (
            isinstance(cache, LatentAttention) and cache.window is not None
        ):
            raise ModelError(f"{spec.name}: SGLang's layout of {cache.kind.replace('_', ' ')} is not established")


def _layer(spec: ModelSpec, cache: Cache, num_layers: int, dtype: Dtype) -> Layer:
    if isinstance(cache, RecurrentState):
        return Layer(cache, num_layers, STATE, _state_bytes(spec, cache))
    if isinstance(cache, IndexerKeys):
        # In fp8 whatever the cache's dtype, with a scale in fp32 for each 128 (DSATokenToKVPool).
        return Layer(cache, num_layers, FULL, cache.head_dim + cache.head_dim // 128 * 4)
    if isinstance(cache, LatentAttention) and is_sparse(spec) and dtype.name == "fp8":
        # The latent in fp8 with a scale in fp32 for each 128, the rotary key in 16 bits.
        rank = cache.kv_lora_rank
        return Layer(cache, num_layers, FULL, rank + rank // 128 * 4 + 2 * cache.qk_rope_head_dim)
    if isinstance(cache, HEADS_CACHES) and cache.window is not None and spec.model_type in _WINDOW_POOL:
        return Layer(cache, num_layers, WINDOW, stored_cache_bytes(cache, 1, dtype))
    return Layer(cache, num_layers, FULL, stored_cache_bytes(cache, 1, dtype))


def _state_bytes(spec: ModelSpec, cache: RecurrentState) -> int:
    """The convolution's inputs in bf16 whatever the model's dtype, and the state in fp32 where the config has no
    mamba_ssm_dtype (mamba2_state_dtype)."""
    stated = spec.config.get("mamba_ssm_dtype")
    state = DTYPES[_STATE_DTYPES.get(stated, "fp32") if isinstance(stated, str) else "fp32"]
    inputs = bytes_of(cache.conv_channels * (cache.conv_kernel - 1), DTYPES["bf16"])
    return inputs + bytes_of(cache.state_elements, state)
