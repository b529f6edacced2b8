"""A model's attention layers as torch modules with their caches, from a ModelSpec."""

from __future__ import annotations

from typing import Union

import torch
from torch import nn

from kvcalc.attention.cache import TokenCache
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.rope import RotaryEmbedding
from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention, LatentAttention, SlidingWindowAttention
from kvcalc.model.spec import AttentionShape, ModelSpec

AttentionLayer = Union[GroupedAttention, MultiHeadLatentAttention]

# One random block is copied all over the weights: drawing billions of numbers would take longer than the run, and
# neither bytes nor times depend on them.
_RANDOM_ELEMENTS = 1 << 20


def check_buildable(spec: ModelSpec) -> None:
    """Refuse (ModelError, exit 3) what the modules cannot run, naming it, before anything is allocated."""
    shape = spec.attention
    if shape.hidden_size is None:
        raise ModelError(f"{spec.name}: hidden_size is not known, and the projections need it", "give --hidden-size")
    if shape.rope_dim % 2:
        raise ModelError(f"{spec.name}: rotary positions turn dimensions in pairs, and {shape.rope_dim} is odd")
    expected = cache_shape(shape)
    for group in spec.layers:
        for cache in group.caches:
            if not isinstance(cache, (FullAttention, SlidingWindowAttention, LatentAttention)):
                raise ModelError(f"{spec.name}: measure does not run {cache.kind.replace('_', ' ')}")
        if len(group.caches) != 1 or group.caches[0].token_rows() != expected:
            raise ModelError(
                f"{spec.name}: layers {group.first} to {group.last} differ from the model's attention; measure runs "
                "models whose layers are alike but for their windows"
            )


def cache_shape(shape: AttentionShape) -> tuple[int, ...]:
    """The rows one token adds in a layer of `shape`, as `Cache.token_rows` gives them."""
    if shape.is_latent:
        return (shape.kv_lora_rank + shape.qk_rope_head_dim,)
    return (shape.num_kv_heads * shape.qk_head_dim, shape.num_kv_heads * shape.v_head_dim)


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """The window of every layer, in order."""
    return [group.caches[0].window for group in spec.layers for _ in range(group.num_layers)]


def build_layer(
    shape: AttentionShape, window: int | None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> AttentionLayer:
    """One attention layer of `shape`, with torch's own initialisation."""
    if shape.hidden_size is None:
        raise ModelError("hidden_size is not known, and the projections need it", "give --hidden-size")
    if shape.is_latent:
        return MultiHeadLatentAttention(
            shape.hidden_size, shape.num_heads, shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim,
            shape.v_head_dim, q_lora_rank=shape.q_lora_rank, qkv_bias=shape.qkv_bias, output_bias=shape.output_bias,
            rope_theta=shape.rope_theta, window=window, dtype=dtype, device=device,
        )  # fmt: skip
    return GroupedAttention(
        shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.qk_head_dim, shape.v_head_dim,
        qkv_bias=shape.qkv_bias, output_bias=shape.output_bias, rope_dim=shape.rope_dim, rope_theta=shape.rope_theta,
        window=window, dtype=dtype, device=device,
    )  # fmt: skip


def materialize(layer: AttentionLayer, device: torch.device, generator: torch.Generator) -> AttentionLayer:
    """Give a layer built on the meta device its memory on `device`, and weights within 1 / sqrt(fan_in)."""
    layer.to_empty(device=device)
    block = torch.rand(_RANDOM_ELEMENTS, generator=generator).mul_(2).sub_(1).to(device)
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            _fill(module.weight.data, block * module.in_features**-0.5)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.data.fill_(1.0)
        elif isinstance(module, RotaryEmbedding):
            module.set_frequencies(device)
    return layer.eval().requires_grad_(False)


def make_cache(
    layer: AttentionLayer, batch_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> TokenCache:
    """The preallocated cache of one layer: what its module keeps, for `max_tokens` tokens or its window."""
    return TokenCache(batch_size, layer.cache_shapes(), max_tokens, layer.window, dtype, device)


def _fill(weight: torch.Tensor, block: torch.Tensor) -> None:
    flat, block = weight.view(-1), block.to(weight.dtype)
    for start in range(0, flat.numel(), block.numel()):
        piece = flat[start : start + block.numel()]
        piece.copy_(block[: piece.numel()])
