"""Tensor parallelism: the part of a model's attention on one rank.

Query heads are divided over the ranks. KV heads are divided too, and replicated if there are more ranks than KV heads.
MLA's latent, its down-projections and its norms are on every rank. The output projection only takes the rank's heads,
so a layer's output is the sum over the ranks (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from torch import nn

from kvcalc.attention.grouped import GroupedAttention
from kvcalc.attention.latent import MultiHeadLatentAttention
from kvcalc.memory.kv_cache import on_device
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec, map_attention


def share_of_shape(shape: AttentionShape, size: int) -> AttentionShape:
    """The shape on one of `size` ranks. `size` must divide the heads, which resolve_workload checks."""
    heads = shape.num_heads // size
    kv_heads = heads if shape.is_latent else max(1, shape.num_kv_heads // size)
    return shape._replace(num_heads=heads, num_kv_heads=kv_heads)


def share_of_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The share of the model that each of `size` ranks runs and caches. All ranks have equal shares."""
    if size == 1:
        return spec
    shared = map_attention(on_device(spec, size), lambda m: m._replace(shape=share_of_shape(m.shape, size)))
    return shared._replace(attention=share_of_shape(spec.attention, size))


def copy_share(whole: nn.Module, share: nn.Module, rank: int, size: int) -> None:
    """Copy one rank's part of the layer `whole` into `share`, a layer with that rank's shape.

    Only rank 0 gets the output bias, because the sum must include it once.
    """
    if isinstance(whole, MultiHeadLatentAttention) and isinstance(share, MultiHeadLatentAttention):
        _copy_latent(whole, share, rank)
    elif isinstance(whole, GroupedAttention) and isinstance(share, GroupedAttention):
        _copy_grouped(whole, share, rank, size)
    else:
        raise TypeError(f"cannot shard {type(whole).__name__}")
    first = rank * share.o_proj.in_features
    share.o_proj.weight.data.copy_(whole.o_proj.weight.data[:, first : first + share.o_proj.in_features])
    if share.o_proj.bias is not None:
        share.o_proj.bias.data.copy_(whole.o_proj.bias.data * (rank == 0))


def _copy_grouped(whole: GroupedAttention, share: GroupedAttention, rank: int, size: int) -> None:
    # Query head i reads KV head i // (H / G), so a rank's first KV head follows from its first query head.
    kv_head = rank * whole.num_kv_heads // size
    _copy_rows(whole.q_proj, share.q_proj, rank * share.num_heads * share.head_dim)
    _copy_rows(whole.k_proj, share.k_proj, kv_head * share.head_dim)
    _copy_rows(whole.v_proj, share.v_proj, kv_head * share.v_head_dim)
    if share.gate_proj is not None and whole.gate_proj is not None:
        _copy_rows(whole.gate_proj, share.gate_proj, rank * share.gate_proj.out_features)


def _copy_latent(whole: MultiHeadLatentAttention, share: MultiHeadLatentAttention, rank: int) -> None:
    first = rank * share.num_heads * (share.nope + share.rope_width)
    if isinstance(whole.q_proj, nn.Sequential) and isinstance(share.q_proj, nn.Sequential):
        for mine, theirs in zip(share.q_proj[:-1].parameters(), whole.q_proj[:-1].parameters()):
            mine.data.copy_(theirs.data)
        _copy_rows(whole.q_proj[-1], share.q_proj[-1], first)
    else:
        _copy_rows(whole.q_proj, share.q_proj, first)
    _copy_rows(whole.kv_down, share.kv_down, 0)
    share.kv_norm.weight.data.copy_(whole.kv_norm.weight.data)
    _copy_rows(whole.kv_up, share.kv_up, rank * share.num_heads * (share.nope + share.v_head_dim))
    if share.gate_proj is not None and whole.gate_proj is not None:
        _copy_rows(whole.gate_proj, share.gate_proj, rank * share.gate_proj.out_features)


def _copy_rows(whole: nn.Module, share: nn.Module, first: int) -> None:
    """Copy rows of `whole`'s weight and bias, starting at `first`, into `share`."""
    for mine, theirs in zip(share.parameters(), whole.parameters()):
        mine.data.copy_(theirs.data[first : first + mine.shape[0]])
