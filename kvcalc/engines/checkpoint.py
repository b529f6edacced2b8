"""The cache type that a checkpoint names in its `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.errors import CacheTypeError
from kvcalc.memory.dtypes import parse_weight_dtype

if TYPE_CHECKING:
    from kvcalc.model.spec import ModelSpec

# Models whose NVFP4 checkpoint by NVIDIA names no cache type. 16 published configs were read (nvidia/*-NVFP4 for
# DeepSeek-V4, Gemma 4, GLM-5, Kimi K2, MiniMax, Qwen3.5 and Qwen3.6). The other 12 name an fp8 cache (kv_cache_scheme).
_WITHOUT_CACHE_TYPE = ("qwen3.6-35b-a3b",)
_TYPES_WITHOUT_CACHE_TYPE = ("deepseek_v4", "deepseek_ref", "minimax_m3", "minimax_m3_vl_text")

# What a recipe of presets/types/releases.yaml says for copies whose own config was not read and may name a cache type.
_UNKNOWN = "unknown"
_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


def quantized_cache(outer: object, methods: tuple[str, ...]) -> tuple[str, str] | None:
    """The cache type in the quantization_config `outer` (`fp8` or `nvfp4`), and the key that names it.

    Returns None if the checkpoint was not made by one of `methods`, or names no cache type or another one. Raises
    CacheTypeError for a copy whose config was not read, if such copies may name one. The key
    kv_cache_quant_algo holds a name, and kv_cache_scheme holds a number of bits and a type. Both may be inside a nested
    `quantization` (modelopt's hf_quant_config.json).
    """
    if not _is_made_by(outer, methods) or not isinstance(outer, Mapping):
        return None
    nested = outer.get("quantization")
    inner = nested if isinstance(nested, Mapping) else outer
    for key in _KEYS:
        scheme = inner.get(key) or outer.get(key)
        if scheme == _UNKNOWN:
            raise CacheTypeError("whether this release asks for an fp8 cache was not found", "set --kv-dtype")
        if scheme:
            name = _of_scheme(scheme) if isinstance(scheme, Mapping) else str(scheme).casefold()
            return (name, f"quantization_config.{key}") if name in ("fp8", "nvfp4") else None
    return None


def published_cache(spec: ModelSpec, dtype: str | None) -> tuple[str, str] | None:
    """The cache type of the published checkpoint with weights in `dtype`, and the reason. None if it names no type.

    Only nvfp4 is known: its checkpoints are NVIDIA's, made by modelopt with an fp8 cache. Checkpoints in fp8 have
    many makers, and most name no cache type. If the model's own config is of such a checkpoint, the config decides.
    """
    weights = parse_weight_dtype(dtype)
    if weights is None or weights.name != "nvfp4" or _is_made_by(spec.quantization, ("modelopt",)):
        return None
    if spec.model_type in _TYPES_WITHOUT_CACHE_TYPE or spec.name.casefold() in _WITHOUT_CACHE_TYPE:
        return None
    return "fp8", "NVIDIA's nvfp4 checkpoints name an fp8 cache"


def is_from_a_name(spec: ModelSpec) -> bool:
    """Whether a rule for names gives the cache type of the checkpoint, whose config was not read."""
    outer = spec.quantization
    return spec.checkpoint is None and isinstance(outer, Mapping) and any(key in outer for key in _KEYS)


def has_unknown_cache(spec: ModelSpec) -> bool:
    """Whether the checkpoint's config, which may name a type of the cache, was not read."""
    outer = spec.quantization
    return isinstance(outer, Mapping) and any(outer.get(key) == _UNKNOWN for key in _KEYS)


def _is_made_by(outer: object, methods: tuple[str, ...]) -> bool:
    return isinstance(outer, Mapping) and str(outer.get("quant_method", "")).startswith(methods)


def _of_scheme(scheme: Mapping[str, object]) -> str | None:
    if scheme.get("type") != "float":
        return None
    if scheme.get("num_bits") == 8:
        return None if scheme.get("dynamic") else "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else None
