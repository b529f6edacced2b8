"""The cache type that vLLM chooses for sparse attention (DeepSeek-V3.2 and V4, GLM-5), by release and device.

Source, in vLLM 0.33.0: DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM (model_executor/models/config.py),
_canonicalize_sparse_mla_kv_cache_dtype (model_executor/layers/attention/mla_attention.py) and _get_backend_priorities
(platforms/cuda.py). The releases in which a rule begins were found in the wheels of 0.11.2, 0.13, 0.14, 0.16 to 0.20,
0.24, 0.28 and 0.30 to 0.33.
"""

from __future__ import annotations

from kvcalc.engines.place import Place
from kvcalc.model.caches import IndexerKeys, LatentAttention
from kvcalc.model.spec import ModelSpec, all_caches, has_compressed
from kvcalc.releases import Release


def default_cache(spec: ModelSpec, place: Place) -> tuple[str, str] | None:
    """The type that `auto` means for this model, and the reason. None if it is the model's own type.

    - DeepSeek-V4: fp8, on every device (_resolve_dsv4_kv_cache_dtype, models/deepseek_v4/attention.py).
    - GLM-5: fp8 on B200 and B300 since 0.32.
    - The only backend for GeForce and RTX PRO Blackwell keeps packed fp8 rows (since 0.28).
    - 0.11.0 used fp8 for DeepSeek-V3.2 on every device (pull request 25988); 0.11.2 no longer does.
    """
    if has_compressed(spec):
        return "fp8", f"vLLM keeps the cache of {spec.name} in fp8"
    if not is_sparse(spec):
        return None
    if spec.model_type == "glm_moe_dsa" and place.is_sm100 and place.since(0, 32):
        return "fp8", "vLLM's default for GLM-5 on B200 and B300 is fp8"
    if place.is_sm120 and place.since(0, 28):
        return "fp8", "vLLM's sparse attention on this device needs fp8"
    if place.release is not None and Release.of(0, 11) <= place.release < Release.of(0, 11, 1):
        return "fp8", "vLLM 0.11.0 uses fp8 for sparse attention"
    return None


def has_raw_rows(spec: ModelSpec, place: Place) -> bool:
    """Whether an fp8 row of the latent has no scales.

    On B200 and B300, vLLM prefers FlashInfer for an fp8 cache, which reads raw rows. Packed rows (fp8_ds_mla) belong to
    FlashMLA. Before 0.18, every fp8 cache of sparse attention was packed.
    """
    return place.is_sm100 and place.since(0, 18) and is_sparse(spec)


def is_sparse(spec: ModelSpec) -> bool:
    """Whether attention over a latent selects tokens by index keys."""
    kinds = {type(cache) for cache in all_caches(spec)}
    return IndexerKeys in kinds and LatentAttention in kinds
