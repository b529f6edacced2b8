"""The same model with another kind of attention: the what-if of MHA, MQA, GQA and MLA.

Only the attention of layers that have one changes. Layer count, widths and windows stay.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.model.caches import (
    Cache,
    ChunkedAttention,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.memo import remembered
from kvcalc.model.spec import AttentionShape, ModelSpec, all_caches, has_cross_attention, map_caches

VARIANTS = ("mha", "mqa", "gqa", "mla")

# Groups tried where a model has no GQA of its own and none is asked for: the largest of these that divides the heads.
_GROUPS = range(8, 1, -1)


class WhatIf(NamedTuple):
    """What is asked to change: a kind of attention, a number of KV heads, MLA's ranks; None leaves it as it is."""

    attention: str | None = None
    num_kv_heads: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    @property
    def kind(self) -> str | None:
        """The kind asked for, by name or by the options that only one kind has; None where nothing is asked.

        Raises UsageError where the options contradict each other.
        """
        has_ranks = self.kv_lora_rank is not None or self.qk_rope_head_dim is not None
        kind = self.attention
        if kind is not None and kind not in VARIANTS:
            raise UsageError(f"--attention {kind!r}: not a kind of attention", f"one of {', '.join(VARIANTS)}")
        if has_ranks and (kind not in (None, "mla") or self.num_kv_heads is not None):
            raise UsageError("--kv-lora-rank and --qk-rope-head-dim belong to mla, which has no KV heads")
        if self.num_kv_heads is not None and kind == "mla":
            raise UsageError("--kv-heads does not go with --attention mla: the latent is shared by all heads")
        if self.num_kv_heads not in (None, 1) and kind == "mqa":
            raise UsageError(f"--kv-heads {self.num_kv_heads} contradicts --attention mqa, which has 1")
        if has_ranks:
            return "mla"
        return "gqa" if kind is None and self.num_kv_heads is not None else kind


@remembered
def apply(spec: ModelSpec, what_if: WhatIf) -> ModelSpec:
    """`spec` with the attention `what_if` asks for; `spec` itself where it asks for nothing.

    Raises UsageError (exit 2) where the model cannot have it, saying why.
    """
    kind = what_if.kind
    if kind is None:
        return spec
    changed = variant(spec, kind, what_if)
    if isinstance(changed, str):
        by_number = what_if.attention is None and what_if.num_kv_heads is not None
        asked = f"--kv-heads {what_if.num_kv_heads}" if by_number else f"--attention {kind}"
        raise UsageError(f"{asked}: {changed}")
    return changed


def variant(spec: ModelSpec, kind: str, what_if: WhatIf = WhatIf()) -> ModelSpec | str:
    """`spec` as `kind`, or the reason why it cannot be.

    mha: a KV head per query head. mqa: one. gqa: the number asked for, else the model's own, else the largest divisor
    of the heads from 8 down to 2. mla: the ranks asked for, else the model's own, else 4 * head_dim and head_dim / 2,
    the DeepSeek-V2 paper's choice (section 2.1.4). Keys and values keep their widths: an MLA model as MHA
    stores heads * (qk_nope + qk_rope + v) elements a token.
    """
    shape = spec.attention
    if shape.num_heads and kind == shape.kind and what_if == WhatIf():
        return spec
    reason = _cannot_change(spec, kind)
    if reason:
        return reason
    changed = _latent(shape, what_if) if kind == "mla" else _grouped(shape, kind, what_if.num_kv_heads)
    if isinstance(changed, str):
        return changed
    return map_caches(spec, lambda cache: _changed_cache(cache, shape, changed))._replace(attention=changed)


def _cannot_change(spec: ModelSpec, kind: str) -> str | None:
    """Why the model has no what-if of this kind, or None."""
    if not spec.attention.num_heads:
        return "the model has no attention"
    if any(isinstance(cache, CompressedAttention) for cache in all_caches(spec)):
        return "what compressed attention would be without its compression is not defined"
    if kind == "mla" and has_cross_attention(spec):
        return "no published model keeps a latent of an encoder's output"
    return None


@remembered
def side_by_side(spec: ModelSpec, what_if: WhatIf) -> list[tuple[str, ModelSpec | str]]:
    """`variant` of every kind, in order; what `what_if` asks for stands in its own kind's place."""
    asked = what_if.kind
    return [(kind, variant(spec, kind, what_if if kind == asked else WhatIf())) for kind in VARIANTS]


def attention_parameters(shape: AttentionShape) -> int | None:
    """Weights of one attention layer's matrices, biases and norms not counted; None where hidden_size is unknown.

    Grouped: W_Q, W_K, W_V and W_O, 4 * hidden_size^2 where all widths are equal. MLA: the query (through its own
    low rank where the model has one), the joint down-projection of latent and rotary key, the two up-projections W_UK
    and W_UV, and W_O (DeepSeek-V2 paper, section 2.1 and appendix C).
    """
    width = shape.hidden_size
    if width is None:
        return None
    query = shape.num_heads * shape.qk_head_dim
    output = shape.num_heads * shape.v_head_dim * width
    if not shape.is_latent:
        return width * query + width * shape.num_kv_heads * (shape.qk_head_dim + shape.v_head_dim) + output
    queries = shape.q_lora_rank * (width + query) if shape.q_lora_rank else width * query
    down = width * (shape.kv_lora_rank + shape.qk_rope_head_dim)
    up = shape.kv_lora_rank * shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    return queries + down + up + output


@remembered
def layer_parameters(spec: ModelSpec) -> int | None:
    """`attention_parameters` of a model whose layers are alike; None where they differ, or an indexer stands beside."""
    if any(isinstance(cache, CompressedAttention) for cache in all_caches(spec)):
        return None
    attending = [[c for c in group.caches if not isinstance(c, RecurrentState)] for group in spec.layers]
    caches = {cache.token_rows() for kept in attending for cache in kept}
    alone = all(len(kept) <= 1 for kept in attending)
    return attention_parameters(spec.attention) if alone and len(caches) == 1 else None


def _grouped(shape: AttentionShape, kind: str, asked: int | None) -> AttentionShape | str:
    heads = shape.num_heads
    if kind == "mha":
        if asked not in (None, heads):
            return f"mha has a KV head per query head ({heads}), not {asked}"
        num_kv_heads = heads
    elif kind == "mqa":
        num_kv_heads = 1
    elif asked is not None:
        if heads % asked:
            return f"{asked} KV heads do not divide {heads} heads"
        num_kv_heads = asked
    elif shape.kind == "gqa":
        num_kv_heads = shape.num_kv_heads
    else:
        divisors = [groups for groups in _GROUPS if groups < heads and heads % groups == 0]
        if not divisors:
            return f"no number of groups from 2 to 8 divides {heads} heads"
        num_kv_heads = divisors[0]
    return shape._replace(num_kv_heads=num_kv_heads, kv_lora_rank=0, q_lora_rank=0, qk_rope_head_dim=0)


def _latent(shape: AttentionShape, what_if: WhatIf) -> AttentionShape | str:
    if shape.is_latent:
        rank, rope = shape.kv_lora_rank, shape.qk_rope_head_dim
        nope = shape.qk_nope_head_dim
    else:
        if shape.v_head_dim % 2:
            return f"half of head_dim {shape.v_head_dim}, the rotary key's width, is not whole"
        rank, rope = 4 * shape.v_head_dim, shape.v_head_dim // 2
        # The head's own width becomes the part without position; the rotary part comes beside it.
        nope = shape.qk_head_dim
    rank = what_if.kv_lora_rank or rank
    rope = what_if.qk_rope_head_dim or rope
    return shape._replace(
        num_kv_heads=shape.num_heads, qk_head_dim=nope + rope, kv_lora_rank=rank, qk_rope_head_dim=rope, rope_dim=rope
    )


def _changed_cache(cache: Cache, own: AttentionShape, changed: AttentionShape) -> Cache:
    """A layer's cache under the changed attention: its window and the widths of its keys and values stay its own."""
    if isinstance(cache, (IndexerKeys, RecurrentState, CompressedAttention)):
        return cache
    if changed.is_latent:
        if isinstance(cache, LatentAttention) or cache.v_head_dim == own.v_head_dim:
            return LatentAttention(changed.kv_lora_rank, changed.qk_rope_head_dim, cache.window)
        return LatentAttention(4 * cache.v_head_dim, cache.v_head_dim // 2, cache.window)
    k, v = (
        (own.qk_head_dim, own.v_head_dim)
        if isinstance(cache, LatentAttention)
        else (cache.k_head_dim, cache.v_head_dim)
    )
    if isinstance(cache, CrossAttention):
        return CrossAttention(changed.num_kv_heads, k, v, cache.encoder_tokens)
    if isinstance(cache, ChunkedAttention):
        return ChunkedAttention(cache.chunk, changed.num_kv_heads, k, v)
    if cache.window is None:
        return FullAttention(changed.num_kv_heads, k, v)
    return SlidingWindowAttention(cache.window, changed.num_kv_heads, k, v)
