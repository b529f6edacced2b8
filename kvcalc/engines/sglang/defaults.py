"""What `auto` means for the cache's type in SGLang, by checkpoint, model, release and device.

Source, in SGLang 0.5.23: _dsa_kv_cache_dtype_default and _dsa_split_backend_resolution (srt/arg_groups/overrides.py),
calculate_mla_kv_cache_dim (srt/mem_cache/kv_cache_configurator.py) and configure_kv_cache_dtype
(srt/mem_cache/kv_cache_dtype.py). The releases in which a rule begins were found in the wheels of 0.5.1 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.checkpoint import published_cache, quantized_cache
from kvcalc.engines.place import Place
from kvcalc.model.spec import ModelSpec, is_sparse


def default_cache(spec: ModelSpec, dtype: str | None, place: Place) -> tuple[str, str | None]:
    """The type that `auto` means, and the reason. ("auto", None) if it is the model's own type.

    For sparse attention the device decides before the checkpoint is read: fp8 on Blackwell, bf16 on other devices.
    Other models follow a checkpoint with an fp8 cache.
    """
    if spec.model_type == "deepseek_v4":
        # _deepseek_v4_kv_cache_dtype, arg_groups/overrides.py.
        return "fp8", "SGLang's default for DeepSeek-V4 is fp8"
    if is_sparse(spec) and place.device_class is not None:
        name = "fp8" if place.is_sm100 or place.is_sm120 else "bf16"
        return name, f"SGLang's default for sparse attention on this device is {name}"
    published = _of_checkpoint(spec, dtype, place)
    if published is None and is_sparse(spec):
        return "auto", "no device is given; SGLang's default for sparse attention is fp8 on Blackwell"
    return published or ("auto", None)


def _of_checkpoint(spec: ModelSpec, dtype: str | None, place: Place) -> tuple[str, str] | None:
    """fp8 and the reason, if the checkpoint has an fp8 cache. SGLang reads modelopt's since 0.5.3."""
    if not place.since(0, 5, 3):
        return None
    makers = ("modelopt", "compressed-tensors") if _has_static_scales(spec) and place.since(0, 5, 19) else ("modelopt",)
    published = quantized_cache(spec.quantization, makers)
    if published is None:
        return published_cache(spec, dtype)
    return ("fp8", f"the checkpoint's {published[1]} is fp8") if published[0] == "fp8" else None


def _has_static_scales(spec: ModelSpec) -> bool:
    """Whether a kv_cache_scheme of compressed-tensors has one scale per tensor (is_supported_scheme)."""
    scheme = spec.quantization.get("kv_cache_scheme") if isinstance(spec.quantization, Mapping) else None
    return isinstance(scheme, Mapping) and scheme.get("strategy") == "tensor" and scheme.get("symmetric", True) is True


def has_raw_rows(spec: ModelSpec, place: Place) -> bool:
    """Whether an fp8 row of sparse attention's latent has no scales.

    The trtllm backend, SGLang's choice for an fp8 cache on Blackwell since 0.5.10, reads raw rows. GLM-5 on GeForce and
    RTX PRO Blackwell has another backend with packed rows, like Hopper.
    """
    packed = place.is_sm120 and spec.model_type == "glm_moe_dsa"
    return is_sparse(spec) and (place.is_sm100 or place.is_sm120) and not packed and place.since(0, 5, 10)
