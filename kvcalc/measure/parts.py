"""A model's layers as parts that can be run: one attention or recurrent module for every cache a layer holds."""

from __future__ import annotations

from typing import NamedTuple, Union

from kvcalc.attention.recurrent import StateShape
from kvcalc.errors import ModelError
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
from kvcalc.model.spec import AttentionShape, ModelSpec
from kvcalc.model.variants import attention_parameters

_RUN = (FullAttention, SlidingWindowAttention, ChunkedAttention, LatentAttention, CrossAttention, RecurrentState)

# The delta net's sizes, in the words of the configs that have one.
_DELTA_KEYS = (
    ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_num_heads", "linear_head_dim", "linear_head_dim"),
)
_SELECTIVE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")


class Part(NamedTuple):
    """One cache of one layer (from 0) with the shape of the module that fills and reads it."""

    layer: int
    cache: Cache
    shape: Union[AttentionShape, StateShape]

    @property
    def window(self) -> int | None:
        return self.cache.window

    @property
    def is_cross(self) -> bool:
        return isinstance(self.cache, CrossAttention)

    def parameters(self, hidden_size: int) -> int:
        """Of the module's projections."""
        if isinstance(self.shape, StateShape):
            return self.shape.parameters(hidden_size)
        return attention_parameters(self.shape) or 0


def parts_of(spec: ModelSpec) -> list[Part]:
    """The parts of every layer that holds a cache, in order.

    Raises ModelError (exit 3), naming it, for what no module here runs.
    """
    shape = spec.attention
    if shape.hidden_size is None:
        raise ModelError(f"{spec.name}: hidden_size is not known, and the projections need it", "give --hidden-size")
    if shape.rope_dim % 2:
        raise ModelError(f"{spec.name}: rotary positions turn dimensions in pairs, and {shape.rope_dim} is odd")
    parts = []
    for group in spec.layers:
        shapes = [_shape_of(spec, group.first, cache) for cache in group.caches]
        for layer in range(group.first, group.last + 1):
            parts += [Part(layer, cache, found) for cache, found in zip(group.caches, shapes)]
    if not parts:
        raise ModelError(f"{spec.name}: no layer keeps anything")
    return parts


def remarks_on(spec: ModelSpec) -> list[str]:
    """What of the model is run otherwise than it is."""
    caches = [cache for group in spec.layers for cache in group.caches]
    found = []
    without = sum(group.num_layers for group in spec.layers if not group.caches)
    if without:
        found.append(f"{without} of {spec.num_layers} layers keep nothing of their own and are not run")
    if any(isinstance(cache, ChunkedAttention) for cache in caches):
        found.append("layers that attend within a chunk are run as windows of the chunk: as many bytes")
    if any(isinstance(cache, RecurrentState) for cache in caches):
        found.append("recurrent layers run with plain torch operations: their states' bytes are exact, their times "
                     "are not those of fused kernels")  # fmt: skip
    return found


def _shape_of(spec: ModelSpec, layer: int, cache: Cache) -> AttentionShape | StateShape:
    if not isinstance(cache, _RUN):
        what = "compressed attention" if isinstance(cache, CompressedAttention) else cache.kind.replace("_", " ")
        raise ModelError(f"{spec.name}: measure does not run {what}")
    if isinstance(cache, RecurrentState):
        return _state_shape(spec, cache)
    shape = spec.attention
    if isinstance(cache, LatentAttention):
        if not shape.is_latent:
            raise ModelError(f"{spec.name}: a latent in a model without low ranks")
        if cache.kv_lora_rank == shape.kv_lora_rank and cache.qk_rope_head_dim == shape.qk_rope_head_dim:
            return shape
        # The what-if of a layer with heads of its own width: a latent of four heads, as kvcalc.model.variants has it.
        width, rope = cache.kv_lora_rank // 4, cache.qk_rope_head_dim
        return shape._replace(
            kv_lora_rank=cache.kv_lora_rank, qk_rope_head_dim=rope, qk_head_dim=width + rope, v_head_dim=width,
            rope_dim=rope,
        )  # fmt: skip
    if shape.is_latent:
        raise ModelError(f"{spec.name}: layer {layer} keeps K and V beside layers of MLA; measure does not run that")
    heads = _query_heads(spec, layer, cache)
    if heads % cache.num_kv_heads:
        raise ModelError(f"{spec.name}: layer {layer} has {cache.num_kv_heads} KV heads, which do not divide {heads}")
    rope = 0 if isinstance(cache, CrossAttention) or not shape.rope_dim else min(shape.rope_dim, cache.k_head_dim)
    return shape._replace(
        num_heads=heads, num_kv_heads=cache.num_kv_heads, qk_head_dim=cache.k_head_dim, v_head_dim=cache.v_head_dim,
        rope_dim=rope - rope % 2,
    )  # fmt: skip


def _query_heads(spec: ModelSpec, layer: int, cache: Cache) -> int:
    """The layer's own query heads where the config gives them: OpenELM by layer, Step where there is a window."""
    whole = spec.attention.num_heads
    listed = spec.config.get("num_query_heads")
    if isinstance(listed, list) and layer < len(listed) and isinstance(listed[0], int):
        # A rank of several has the same share of every layer's.
        return int(listed[layer]) * whole // listed[0]
    other = spec.config.get("attention_other_setting")
    own = other.get("num_attention_heads") if isinstance(other, dict) else None
    own = spec.config.get("num_sliding_attention_heads", own)
    base = spec.config.get("num_attention_heads")
    if isinstance(cache, SlidingWindowAttention) and isinstance(own, int) and isinstance(base, int):
        return own * whole // base
    return whole


def _state_shape(spec: ModelSpec, cache: RecurrentState) -> StateShape:
    """Which recurrence keeps `cache`, from its own numbers and, for a delta net, the config's."""
    refused = ModelError(f"{spec.name}: measure does not run the recurrence of {spec.model_type}")
    channels, kernel, elements = cache.conv_channels, cache.conv_kernel, cache.state_elements
    if not channels:
        raise refused
    if not elements:
        return StateShape("none", channels, kernel)
    if cache.group_channels and cache.num_heads:
        width = cache.group_channels // (2 * cache.num_groups)
        head_dim = elements // (cache.num_heads * width)
        made = StateShape("linear", channels, kernel, cache.num_heads, cache.num_groups, width, head_dim)
    elif cache.num_heads is None and spec.model_type in _SELECTIVE:
        made = StateShape("selective", channels, kernel, k_width=elements // channels)
    else:
        made = _delta_shape(spec, cache)
    per_head = 2 * made.key_heads * made.k_width + made.heads * made.v_width
    if _product(made.state) != elements or (made.kind != "selective" and per_head != channels):
        raise refused
    return made


def _delta_shape(spec: ModelSpec, cache: RecurrentState) -> StateShape:
    nested = spec.config.get("linear_attn_config")
    flat = dict(spec.config)
    if isinstance(nested, dict):
        flat |= {"linear_num_heads": nested.get("num_heads"), "linear_head_dim": nested.get("head_dim")}
    for keys in _DELTA_KEYS:
        sizes = [flat.get(key) for key in keys]
        if all(isinstance(size, int) for size in sizes):
            heads, key_heads, k_width, v_width = (int(str(size)) for size in sizes)
            return StateShape("delta", cache.conv_channels, cache.conv_kernel, heads, key_heads, k_width, v_width)
    raise ModelError(f"{spec.name}: measure does not run the recurrence of {spec.model_type}")


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
