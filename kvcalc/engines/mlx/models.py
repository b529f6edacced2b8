"""Which models mlx-lm runs, and what the class of each type keeps. `models.yaml` has the types.

Source: mlx_lm/models at commit d78bf58e217c (mlx-lm 0.32.0), and the same files at the tags of older releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvcalc.engines.declarations import types_of
from kvcalc.engines.engine import not_established
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import parse_weight_dtype
from kvcalc.model.caches import (
    Cache,
    ChunkedAttention,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.spec import ModelSpec, all_caches
from kvcalc.notes import Note
from kvcalc.releases import Release

_types = partial(types_of, "mlx")

# MLA: the first release that caches the latent. Before it, and in the last two types in every release, the cache has K
# and V of every head. Source: update_and_fetch in each class, at the tags v0.30.4 to v0.30.7.
_LATENT_SINCE: dict[str, Release | None] = {
    "deepseek_v3": Release.of(0, 30, 6), "kimi_k2": Release.of(0, 30, 6), "deepseek_v32": Release.of(0, 30, 6),
    "glm_moe_dsa": Release.of(0, 30, 6), "glm4_moe_lite": Release.of(0, 30, 5), "kimi_linear": Release.of(0, 30, 7),
    "longcat_flash": Release.of(0, 30, 7), "deepseek_v2": None, "minicpm3": None,
}  # fmt: skip

# Recurrent states are fp32 since this release: gated_delta.py, and dt in ssm.py (v0.31.2). Before it, the state of a
# delta net has the type of the activations.
_FP32_STATES_SINCE = CONTIGUOUS_STATES_SINCE = Release.of(0, 31, 2)


def check_model(spec: ModelSpec, release: Release | None) -> None:
    """Raise ModelError (exit 3) for a model that mlx-lm does not run, or whose cache is not modelled."""
    kind = spec.model_type
    if spec.gguf is not None:
        raise ModelError(
            f"{spec.name}: mlx-lm loads safetensors, not GGUF files",
            "ask about the model's preset or config.json, with --dtype mlx-4bit for 4-bit weights",
        )
    if not any(kind in _types(name) for name in ("rotating", "own_cache", "plain")):
        raise ModelError(f"{spec.name}: mlx-lm's cache of {kind} is not modelled", "count with --engine logical")
    for cache in all_caches(spec):
        if isinstance(cache, (CompressedAttention, CrossAttention)) or (
            isinstance(cache, LatentAttention) and kind not in _LATENT_SINCE
        ):
            raise not_established(spec, "mlx-lm", cache.kind)
    is_older = release is not None and release < _FP32_STATES_SINCE
    has_state = any(isinstance(cache, RecurrentState) and cache.state_elements for cache in all_caches(spec))
    if is_older and has_state and kind not in _types("delta_nets"):
        raise ModelError(
            f"{spec.name}: the state of {kind} before mlx-lm 0.31.2 is not modelled", "use --engine mlx@0.31.2"
        )


def rotates(spec: ModelSpec) -> bool:
    """Whether windowed layers keep only their window."""
    return spec.model_type in _types("rotating")


def makes_own_cache(spec: ModelSpec) -> bool:
    """Whether the model's class makes its cache itself and ignores --max-kv-size."""
    return spec.model_type in _types("rotating") | _types("own_cache")


def kept(spec: ModelSpec, cache: Cache, release: Release | None) -> Cache:
    """The cache that mlx-lm keeps for `cache`: K and V of every head, all tokens, or a state of another type."""
    shape = spec.attention
    if isinstance(cache, LatentAttention):
        # A what-if variant with MLA, of a type without it, has a latent.
        since = _LATENT_SINCE.get(spec.model_type, Release.of(0))
        if since is None or (release is not None and release < since):
            return FullAttention(shape.num_heads, shape.qk_head_dim, shape.v_head_dim)
    if isinstance(cache, SlidingWindowAttention) and not rotates(spec):
        return FullAttention(cache.num_kv_heads, cache.k_head_dim, cache.v_head_dim)
    if isinstance(cache, SlidingWindowAttention) and spec.model_type == "mimo_v2_flash":
        # The model also reads the token before the config's window, but max_size is that window.
        return cache._replace(window=cache.window - 1)
    if isinstance(cache, RecurrentState):
        is_older = release is not None and release < _FP32_STATES_SINCE
        return cache._replace(state_dtype=cache.conv_dtype if is_older else "fp32")
    return cache


def why_not_quantized(spec: ModelSpec, release: Release | None) -> str | None:
    """Why mlx-lm cannot quantize this model's cache. None if it can.

    RotatingKVCache.to_quantized is not implemented. The classes with a latent cannot read a quantized one. Attention
    sinks and quantized caches exclude each other (scaled_dot_product_attention of models/base.py). ChunkedKVCache and
    CacheList stay in 16 bits.
    """
    caches = [kept(spec, cache, release) for cache in all_caches(spec)]
    if any(isinstance(cache, SlidingWindowAttention) for cache in caches):
        return "windows"
    if any(isinstance(cache, LatentAttention) for cache in caches):
        return "a latent (MLA)"
    if any(isinstance(cache, ChunkedAttention) for cache in caches):
        return "chunks"
    if spec.model_type in _types("lists"):
        return "several caches in a layer"
    return None if any(isinstance(cache, FullAttention) for cache in caches) else "a state only"


# The type of a model's weights in MLX, which has types of its own.

# The MLX type with as many bits as a type of other engines. mlx_lm.convert makes these types (--q-bits, --q-mode). MLX
# runs none of llama.cpp's types.
_SAME_BITS = {
    "q4_0": "mlx-4bit", "q4_1": "mlx-4bit", "q4_k_s": "mlx-4bit", "q4_k_m": "mlx-4bit", "iq4_nl": "mlx-4bit",
    "int4": "mlx-4bit", "q5_0": "mlx-5bit", "q5_1": "mlx-5bit", "q5_k_s": "mlx-5bit", "q5_k_m": "mlx-5bit",
    "q6_k": "mlx-6bit", "q8_0": "mlx-8bit", "int8": "mlx-8bit", "mxfp4": "mlx-mxfp4", "mxfp8": "mlx-mxfp8",
    "nvfp4": "mlx-nvfp4",
}  # fmt: skip

# Methods whose weights MLX keeps as they are (load_model, mlx_lm/utils.py). None is MLX's own.
_KEPT = (None, "mxfp4")


def weight_dtype(spec: ModelSpec, dtype_name: str | None) -> tuple[str | None, Note | None]:
    """The weight type that counts for `dtype_name` (None: the config's own type), and a note if it is another one.

    Classes whose checkpoints are fp8 convert them to bf16 (`sanitize` of deepseek_v3, minimax and others). Raises
    UsageError (exit 2) for a type that MLX does not have, and ModelError (exit 3) if the bytes of the config's
    quantization are not known in MLX.
    """
    if dtype_name is None:
        return _own(spec)
    found = parse_weight_dtype(dtype_name)
    if found is None or found.is_float or found.name.startswith("mlx-"):
        return dtype_name, None
    if found.name not in _SAME_BITS:
        raise UsageError(
            f"--dtype {dtype_name}: MLX has no {found.name} weights", "for example --dtype mlx-8bit or bf16"
        )
    same = _SAME_BITS[found.name]
    return same, Note("weights", "mlx-type", f"MLX has no {found.name}: the weights are counted as {same}")


def _own(spec: ModelSpec) -> tuple[str | None, Note | None]:
    stated = spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") in _KEPT:
        return None, None
    method = stated.get("quant_method")
    if method == "fp8":
        dtype = spec.torch_dtype or "bf16"
        text = f"MLX has no fp8: the weights are counted as {dtype}. --dtype mlx-4bit counts a 4-bit conversion"
        return dtype, Note("weights", "mlx-type", text)
    raise ModelError(
        f"{spec.name}: the bytes of {ascii(method)[:40]} weights in MLX are not modelled",
        "for a conversion to 4 bits, use --dtype mlx-4bit",
    )
