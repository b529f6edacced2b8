"""The same model with another kind of attention: the what-if of MHA, MQA, GQA and MLA.

Only the attention of layers that have one changes. Layer count, widths and windows stay.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import ModelSpec, all_caches, has_cross_attention, map_attention

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
    return changed if isinstance(changed, str) else _changed(spec, changed)


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


@remembered
def layer_parameters(spec: ModelSpec) -> int | None:
    """Weights of one attention module's matrices (`Attention.parameters`), None where layers differ, where a layer
    keeps more than one cache, or where an indexer stands beside."""
    if any(isinstance(cache, CompressedAttention) for cache in all_caches(spec)):
        return None
    rows, counts = set(), set()
    for group in spec.layers:
        kept = [cache for cache in group.caches if not isinstance(cache, RecurrentState)]
        if len(kept) > 1:
            return None
        rows |= {cache.token_rows() for cache in kept}
        counts |= {mixer.parameters for mixer in group.layer.attention if mixer.keeps}
    return counts.pop() if len(rows) == 1 and len(counts) == 1 else None


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
    return _with_heads(shape, num_kv_heads)


def _latent(shape: AttentionShape, what_if: WhatIf) -> AttentionShape | str:
    if shape.is_latent:
        rank, rope, nope = shape.kv_lora_rank, shape.qk_rope_head_dim, shape.qk_nope_head_dim
    else:
        if shape.v_head_dim % 2:
            return f"half of head_dim {shape.v_head_dim}, the rotary key's width, is not whole"
        rank, rope = 4 * shape.v_head_dim, shape.v_head_dim // 2
        # The head's own width becomes the part without position; the rotary part comes beside it.
        nope = shape.qk_head_dim
    return _with_latent(shape, nope, what_if.kv_lora_rank or rank, what_if.qk_rope_head_dim or rope)


def _changed(spec: ModelSpec, changed: AttentionShape) -> ModelSpec:
    """`spec` with its attention modules changed as its main one is."""
    new = map_attention(spec, lambda mixer: _changed_mixer(mixer, spec.attention, changed))
    groups = (group._replace(caches=tuple(map(_as_bound, group.caches, group.layer.caches))) for group in new.layers)
    return new._replace(attention=changed, layers=tuple(groups))


def _changed_mixer(mixer: Attention, own: AttentionShape, changed: AttentionShape) -> Attention:
    """Its window and the widths of its keys and values stay its own."""
    shape = mixer.shape
    if not changed.is_latent:
        new = _with_heads(shape, shape.num_heads if changed.kind == "mha" else changed.num_kv_heads)
    elif shape.v_head_dim == own.v_head_dim:
        new = _with_latent(shape, changed.qk_nope_head_dim, changed.kv_lora_rank, changed.qk_rope_head_dim)
    else:
        # A layer with heads of its own width: a latent of four heads, as for a model that has none.
        new = _with_latent(shape, shape.qk_head_dim, 4 * shape.v_head_dim, shape.v_head_dim // 2)
    return mixer._replace(most_read_tokens=None, shape=new)


def _with_heads(shape: AttentionShape, num_kv_heads: int) -> AttentionShape:
    return shape._replace(num_kv_heads=num_kv_heads, kv_lora_rank=0, q_lora_rank=0, qk_rope_head_dim=0)


def _with_latent(shape: AttentionShape, nope: int, rank: int, rope: int) -> AttentionShape:
    return shape._replace(
        num_kv_heads=shape.num_heads, qk_head_dim=nope + rope, kv_lora_rank=rank, qk_rope_head_dim=rope, rope_dim=rope
    )


def _as_bound(old: Cache, new: Cache) -> Cache:
    """A changed layer's cache with what the workload said of the old one."""
    if isinstance(old, RecurrentState):
        return old
    if isinstance(old, CrossAttention) and isinstance(new, CrossAttention):
        return new._replace(encoder_tokens=old.encoder_tokens)
    return new
