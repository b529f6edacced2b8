"""What a checkpoint says of its cache: the cache's type inside `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping


def quantized_cache(outer: object, methods: tuple[str, ...]) -> tuple[str, str] | None:
    """The cache's type a checkpoint with the quantization_config `outer`, made by one of `methods`, asks for, as `fp8`
    or `nvfp4`, and the key that says so; None where it asks for none or for another.

    A name stands in kv_cache_quant_algo, a scheme of bits and type in kv_cache_scheme; either may stand in an inner
    `quantization` (modelopt's hf_quant_config.json).
    """
    if not isinstance(outer, Mapping) or not str(outer.get("quant_method", "")).startswith(methods):
        return None
    nested = outer.get("quantization")
    inner = nested if isinstance(nested, Mapping) else outer
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        asked = inner.get(key) or outer.get(key)
        if asked:
            name = _of_scheme(asked) if isinstance(asked, Mapping) else str(asked).casefold()
            return (name, f"quantization_config.{key}") if name in ("fp8", "nvfp4") else None
    return None


def _of_scheme(scheme: Mapping[str, object]) -> str | None:
    if scheme.get("type") != "float":
        return None
    if scheme.get("num_bits") == 8:
        return None if scheme.get("dynamic") else "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else None
