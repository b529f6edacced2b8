"""Build a model's layers as torch modules with their caches, from the parts of a ModelSpec."""

from __future__ import annotations

from typing import Union

import torch
from torch import Tensor, nn

from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.attention.ragged import RaggedCache
from kvcalc.attention.recurrent import RecurrentMixer, StateCache, StateShape
from kvcalc.attention.rope import RotaryEmbedding
from kvcalc.errors import ModelError
from kvcalc.measure.layers.parts import Part
from kvcalc.measure.layers.storage import Storage
from kvcalc.model.mixers.attention import AttentionShape

AttentionLayer = Union[GroupedAttention, MultiHeadLatentAttention]
Layer = Union[AttentionLayer, RecurrentMixer]
LayerCache = Union[TokenCache, StateCache]

TORCH_DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip

_RANDOM_ELEMENTS = 1 << 20


def build_part(part: Part, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """The torch module of one part."""
    if isinstance(part.shape, StateShape):
        return RecurrentMixer(hidden_size, part.shape, dtype=dtype, device=device)
    layer = build_layer(part.shape, part.window, dtype, device)
    if isinstance(layer, GroupedAttention) and part.is_cross:
        layer.causal, layer.is_cross = False, True
    return layer


def build_layer(
    shape: AttentionShape, window: int | None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> AttentionLayer:
    """One attention layer of `shape`, with torch's default initialisation. Raises ModelError without a hidden_size."""
    if shape.hidden_size is None:
        raise ModelError("hidden_size is not known, but the projections need it", "set --hidden-size")
    if shape.is_latent:
        return MultiHeadLatentAttention(
            shape.hidden_size, shape.num_heads, shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim,
            shape.v_head_dim, q_lora_rank=shape.q_lora_rank, qkv_bias=shape.qkv_bias, output_bias=shape.output_bias,
            output_gate=shape.output_gate, head_gate=shape.head_gate, rope_theta=shape.rope_theta, window=window,
            dtype=dtype, device=device,
        )  # fmt: skip
    return GroupedAttention(
        shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.qk_head_dim, shape.v_head_dim,
        qkv_bias=shape.qkv_bias, output_bias=shape.output_bias, output_gate=shape.output_gate,
        head_gate=shape.head_gate, rope_dim=shape.rope_dim, rope_theta=shape.rope_theta, window=window,
        dtype=dtype, device=device,
    )  # fmt: skip


def random_block(seed: int, device: torch.device) -> Tensor:
    """Random numbers from -1 to 1, which are copied repeatedly into a model's weights.

    Drawing billions of numbers would take longer than the run, and neither bytes nor times depend on them.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(_RANDOM_ELEMENTS, generator=generator).mul_(2).sub_(1).to(device)


def materialize(layer: Layer, device: torch.device, block: Tensor) -> Layer:
    """Allocate a layer, which was built on the meta device, on `device`.

    Its weights are copies of `block`, scaled to within 1 / sqrt(fan_in).
    """
    for module in layer.modules():
        # to_empty is not used, because its empty_like on the meta device loads sympy, which takes a second.
        for name, parameter in module.named_parameters(recurse=False):
            memory = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=False))
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            fill(module.weight.data, block, module.in_features**-0.5)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.data.fill_(1.0)
        elif isinstance(module, RecurrentMixer):
            module.conv.data.fill_(1.0 / module.shape.kernel)
        elif isinstance(module, RotaryEmbedding):
            module.set_frequencies(device)
    return layer.eval()


def make_cache(
    layer: AttentionLayer, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    storage: Storage = Storage(), seed: int = 0,
) -> TokenCache:  # fmt: skip
    """The cache of one attention layer, for sequences of up to `lengths` tokens or its window."""
    stored = TORCH_DTYPES[storage.kv_dtype] if storage.kv_dtype else None
    batch_size, max_tokens = len(lengths), max(lengths)
    if min(lengths) < max_tokens:
        shapes, window, page = layer.cache_shapes(), layer.window, storage.block_size
        return RaggedCache(lengths, shapes, window, dtype, device, stored, storage.scales, block_size=page, seed=seed)
    given = (batch_size, layer.cache_shapes(), max_tokens, layer.window, dtype, device, stored, storage.scales)
    if storage.block_size is not None:
        return PagedCache(*given, block_size=storage.block_size, seed=seed)
    return GrowingCache(*given) if storage.kind == "grow" else TokenCache(*given)


def fill(weight: Tensor, block: Tensor, scale: float = 1.0) -> None:
    """Fill `weight` with copies of `block`, multiplied by `scale`."""
    flat = weight.view(-1)
    block = (block[: flat.numel()] * scale).to(weight.dtype)
    for start in range(0, flat.numel(), block.numel()):
        piece = flat[start : start + block.numel()]
        piece.copy_(block[: piece.numel()])
