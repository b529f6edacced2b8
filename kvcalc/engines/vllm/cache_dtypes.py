"""vLLM's own cache types (`--kv-cache-dtype`), and the bytes of one token in one layer.

Source: CacheDType of config/cache.py, get_kv_quant_mode of v1/kv_cache_interface.py and each attention backend's
customize_spec, vLLM 0.33.0.
"""

from __future__ import annotations

from kvcalc.engines.place import ANYWHERE, RAW_FP8, Place
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, by_name, bytes_of
from kvcalc.model.caches import HeadsCache, LatentAttention

PLAIN = ("fp32", "fp16", "bf16", "fp8")

# vLLM's own types, and the first release that has them (CacheDType, config/cache.py of 0.11.2 to 0.33.0). They had the
# same size in all of these releases (real_page_size_bytes, v1/kv_cache_interface.py).
SINCE: dict[str, tuple[int, int]] = {
    "fp8_ds_mla": (0, 11), "nvfp4": (0, 20), "int8_per_token_head": (0, 20), "fp8_per_token_head": (0, 20),
    "int4_per_token_head": (0, 25), "nvfp4_ds_mla": (0, 30),
    **dict.fromkeys(("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"), (0, 20)),
}  # fmt: skip
# Windows in nvfp4 had pages of another size before this release (SlidingWindowSpec).
_NVFP4_WINDOWS = (0, 26)

_KNOWN = ", ".join((*PLAIN, *SINCE))

# Bits of a key and of a value. A key of less than 8 bits has a norm, and a value a scale and a zero, in 16 bits each. A
# head takes an even number of bytes (TurboQuantConfig, layers/quantization/turboquant/config.py, 0.20.0 to 0.33.0).
TURBOQUANT = {
    "turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3)
}  # fmt: skip

# Names for the same layout: fp8_inc is fp8, and nvfp4_4over6 has the layout of nvfp4 (is_nvfp4).
_ALIASES = {"fp8_inc": "fp8", "nvfp4_4over6": "nvfp4"}

# Only the elements: the scales are counted with the layout.
_OWN = by_name(
    Dtype("int8_per_token_head", 8),
    Dtype("fp8_per_token_head", 8),
    Dtype("int4_per_token_head", 4, 2, 1),
    Dtype("fp8_ds_mla", 8),
    DTYPES["nvfp4"]._replace(name="nvfp4_ds_mla"),
    *(Dtype(name, k, 8, k, v=Dtype(name, v, 8, v)) for name, (k, v) in TURBOQUANT.items()),
)

# Prefixes of types that are not modelled: the layout depends on a kernel of one platform.
_NOT_COUNTED = ("octave_", "ultraquant_")

# Every head has an fp32 scale for K and one for V (TritonAttentionBackend.customize_spec).
_HEAD_SCALES_BYTES = 2 * 4


# Bytes of one token in sparse attention's packed layouts, for 512 latent and 64 rotary dimensions
# (MLAAttention.get_kv_cache_spec; flashmla_sparse.py describes FlashMLA's layouts). fp8_ds_mla: 512 in fp8, an fp32
# scale per 128 of them, and the 64 rotary dimensions in 16 bits. nvfp4_ds_mla: 512 in fp4, an fp8 scale per 16, and
# the 64 in fp8.
_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def own_dtype(dtype_name: str) -> Dtype | str:
    """The type that vLLM calls `dtype_name`, or `dtype_name` itself if vLLM has no type of that name.

    Raises UsageError (exit 2) for a type that vLLM has but kvcalc does not model.
    """
    name = dtype_name.casefold()
    if name.startswith(_NOT_COUNTED):
        raise UsageError(f"--kv-dtype {dtype_name[:40]}: this vLLM type is not modelled", f"one of {_KNOWN}")
    name = _ALIASES.get(name, name)
    return _OWN.get(name, name if name in DTYPES else dtype_name)


def check_dtype(dtype: Dtype, place: Place) -> None:
    """Raise UsageError (exit 2) for a cache type that vLLM, or the requested release, does not support."""
    if dtype.name not in (*PLAIN, *SINCE) and dtype != RAW_FP8:
        raise UsageError(f"--kv-dtype {dtype.name}: not a supported cache dtype of vLLM", f"one of {_KNOWN}")
    since = SINCE.get(dtype.name)
    if since is not None and not place.since(*since):
        first = f"it is in vLLM {since[0]}.{since[1]} and later"
        raise UsageError(f"--kv-dtype {dtype.name}: this release of vLLM does not have it", first)


def heads_bytes(cache: HeadsCache, dtype: Dtype, place: Place = ANYWHERE) -> int:
    """Bytes of one token's K and V in one layer.

    Raises UsageError (exit 2) for a type or width that no backend supports.
    """
    k, v = cache.num_kv_heads * cache.k_head_dim, cache.num_kv_heads * cache.v_head_dim
    if dtype.name.endswith("_ds_mla"):
        raise UsageError(f"--kv-dtype {dtype.name}: only for sparse attention with MLA")
    packs = dtype.name in TURBOQUANT
    kinds = ("full_attention",) if packs else ("full_attention", "sliding_window_attention")
    if dtype.name in SINCE and cache.kind not in kinds:
        raise UsageError(f"--kv-dtype {dtype.name}: not modelled for {cache.kind.replace('_', ' ')}")
    if (dtype.name == "nvfp4" or packs) and cache.k_head_dim != cache.v_head_dim:
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM needs the same head_dim for K and V")
    if packs:
        key, value = TURBOQUANT[dtype.name]
        size = ceil_div(cache.k_head_dim * key, 8) + (2 if key < 8 else 0) + ceil_div(cache.k_head_dim * value, 8) + 4
        return cache.num_kv_heads * round_up(size, 2)
    if dtype.name == "nvfp4":
        if cache.k_head_dim % 16:
            raise UsageError("--kv-dtype nvfp4: vLLM needs a head_dim that is a multiple of 16")
        if cache.window is not None and not place.since(*_NVFP4_WINDOWS):
            raise UsageError("--kv-dtype nvfp4: windows in nvfp4 are only modelled for vLLM 0.26 and later")
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
    if dtype.name in SINCE:
        where = "the latent of sparse attention" if sparse else "the latent"
        hint = "one of fp8_ds_mla, nvfp4_ds_mla, bf16" if sparse else "one of bf16, fp8"
        raise UsageError(f"--kv-dtype {dtype.name}: vLLM does not support it for {where}", hint)
    return bytes_of(cache.kv_lora_rank + cache.qk_rope_head_dim, dtype)
