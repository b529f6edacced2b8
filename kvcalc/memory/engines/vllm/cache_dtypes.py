"""vLLM's own cache types (`--kv-cache-dtype`), and the bytes of one token in one layer.

Source: CacheDType of config/cache.py, get_kv_quant_mode of v1/kv_cache_interface.py and each attention backend's
customize_spec, vLLM 0.33.0.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, by_name, bytes_of
from kvcalc.memory.engines.place import RAW_FP8
from kvcalc.model.caches import HeadsCache, LatentAttention

PLAIN = ("fp32", "fp16", "bf16", "fp8")

# Types that are modelled only for the newest release.
NEWEST_ONLY = (
    "nvfp4", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla",
)  # fmt: skip

_KNOWN = ", ".join((*PLAIN, *NEWEST_ONLY))

# Names for the same layout: fp8_inc is fp8, and nvfp4_4over6 has the layout of nvfp4 (is_nvfp4).
_ALIASES = {"fp8_inc": "fp8", "nvfp4_4over6": "nvfp4"}

# Only the elements: the scales are counted with the layout.
_OWN = by_name(
    Dtype("int8_per_token_head", 8),
    Dtype("fp8_per_token_head", 8),
    Dtype("int4_per_token_head", 4, 2, 1),
    Dtype("fp8_ds_mla", 8),
    DTYPES["nvfp4"]._replace(name="nvfp4_ds_mla"),
)

# Prefixes of types that are not modelled: some layers stay in the model's dtype, or the layout depends on a kernel of
# one platform.
_NOT_COUNTED = ("turboquant_", "octave_", "ultraquant_")

# Every head has an fp32 scale for K and one for V (TritonAttentionBackend.customize_spec).
_HEAD_SCALES_BYTES = 2 * 4


# Bytes of one token in sparse attention's packed layouts, for 512 latent and 64 rotary dimensions
# (MLAAttention.get_kv_cache_spec; flashmla_sparse.py describes FlashMLA's layouts). fp8_ds_mla: 512 in fp8, an fp32
# scale per 128 of them, and the 64 rotary dimensions in 16 bits. nvfp4_ds_mla: 512 in fp4, an fp8 scale per 16, and
# the 64 in fp8.
_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def own_dtype(asked: str) -> Dtype | str:
    """The type that vLLM calls `asked`, or `asked` itself if vLLM has no type of that name.

    Raises UsageError (exit 2) for a type that vLLM has but kvcalc does not model.
    """
    name = asked.casefold()
    if name.startswith(_NOT_COUNTED):
        raise UsageError(f"--kv-dtype {asked[:40]}: this vLLM type is not modelled", f"one of {_KNOWN}")
    name = _ALIASES.get(name, name)
    return _OWN.get(name, name if name in DTYPES else asked)


def check_dtype(dtype: Dtype, newest: bool) -> None:
    """Raise UsageError (exit 2) for a cache type that vLLM, or the requested release, does not support."""
    if dtype.name not in (*PLAIN, *NEWEST_ONLY) and dtype != RAW_FP8:
        raise UsageError(f"--kv-dtype {dtype.name}: not a supported cache dtype of vLLM", f"one of {_KNOWN}")
    if dtype.name in NEWEST_ONLY and not newest:
        raise UsageError(f"--kv-dtype {dtype.name}: only modelled for the newest vLLM", f"one of {', '.join(PLAIN)}")


def heads_bytes(cache: HeadsCache, dtype: Dtype) -> int:
    """Bytes of one token's K and V in one layer.

    Raises UsageError (exit 2) for a type or width that no backend supports.
    """
    k, v = cache.num_kv_heads * cache.k_head_dim, cache.num_kv_heads * cache.v_head_dim
    if dtype.name.endswith("_ds_mla"):
        raise UsageError(f"--kv-dtype {dtype.name}: only for sparse attention with MLA")
    if dtype.name in NEWEST_ONLY and cache.kind not in ("full_attention", "sliding_window_attention"):
        raise UsageError(f"--kv-dtype {dtype.name}: not modelled for {cache.kind.replace('_', ' ')}")
    if dtype.name == "nvfp4" and (cache.k_head_dim != cache.v_head_dim or cache.k_head_dim % 16):
        raise UsageError("--kv-dtype nvfp4: vLLM needs the same head_dim for K and V, and a multiple of 16")
    scales = cache.num_kv_heads * _HEAD_SCALES_BYTES if dtype.name.endswith("_per_token_head") else 0
    return bytes_of(k, dtype) + bytes_of(v, dtype) + scales


def latent_bytes(cache: LatentAttention, dtype: Dtype, sparse: bool) -> int:
    """Bytes of one token's latent and rotary key in one layer.

    Raises UsageError (exit 2) for a type that no backend supports.
    """
    layout = "fp8_ds_mla" if dtype.name == "fp8" else dtype.name
    packed = _PACKED.get(layout) if sparse else None
    if packed is not None:
        if (cache.kv_lora_rank, cache.qk_rope_head_dim) != (512, 64):
            text = f"the layout {layout} needs kv_lora_rank 512 and qk_rope_head_dim 64"
            raise UsageError(f"--kv-dtype {dtype.name}: {text}")
        return packed
    if dtype.name in NEWEST_ONLY:
        where = "the latent of sparse attention" if sparse else "the latent"
        hint = "one of fp8_ds_mla, nvfp4_ds_mla, bf16" if sparse else "one of bf16, fp8"
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM does not support it for {where}", hint)
    return bytes_of(cache.kv_lora_rank + cache.qk_rope_head_dim, dtype)
