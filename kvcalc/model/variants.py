"""What-if variants: the same model with MHA, MQA, GQA or MLA attention.

Only the attention modules change. The number of layers, the widths and the windows stay the same.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import ModelSpec, all_caches, has_cross_attention, map_attention
from kvcalc.records import NamedTuple

VARIANTS = ("mha", "mqa", "gqa", "mla")

# The numbers of KV heads to try for GQA if the model has no GQA of its own and the user gives no number. The largest
# one that divides the heads is used.
_GROUPS = range(8, 1, -1)


class WhatIf(NamedTuple):
    """The requested change: a kind of attention, a number of KV heads, or MLA's ranks. None means no change."""

    attention: str | None = None
    num_kv_heads: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    @property
    def kind(self) -> str | None:
        """The requested kind, by its name or by options that only one kind has. None if no change is requested.

        Raises UsageError if the options contradict each other.
        """
        has_ranks = self.kv_lora_rank is not None or self.qk_rope_head_dim is not None
        kind = self.attention
        if kind is not None and kind not in VARIANTS:
            several = all(word.strip() in (*VARIANTS, "all") for word in kind.split(","))
            hint = f"one of {', '.join(VARIANTS)}"
            if several:
                hint = f"give one; for several: kvcalc compare MODEL --attention {kind}"
            raise UsageError(f"--attention {kind!r}: not a kind of attention", hint)
        if has_ranks and (kind not in (None, "mla") or self.num_kv_heads is not None):
            raise UsageError("--kv-lora-rank and --qk-rope-head-dim belong to mla, which has no KV heads")
        if self.num_kv_heads is not None and kind == "mla":
            raise UsageError("--kv-heads cannot be used with --attention mla: all heads share the latent")
        if self.num_kv_heads not in (None, 1) and kind == "mqa":
            raise UsageError(f"--kv-heads {self.num_kv_heads} contradicts --attention mqa, which has 1 KV head")
        if has_ranks:
            return "mla"
        return "gqa" if kind is None and self.num_kv_heads is not None else kind


@remembered
def apply(spec: ModelSpec, what_if: WhatIf) -> ModelSpec:
    """Return `spec` with the attention that `what_if` requests, or `spec` itself if it requests no change.

    Raises UsageError (exit 2) with the reason if the model cannot have that attention.
    """
    kind = what_if.kind
    if kind is None:
        return spec
    changed = variant(spec, kind, what_if)
    if isinstance(changed, str):
        by_number = what_if.attention is None and what_if.num_kv_heads is not None
        requested = f"--kv-heads {what_if.num_kv_heads}" if by_number else f"--attention {kind}"
        raise UsageError(f"{requested}: {changed}")
    return changed


def variant(spec: ModelSpec, kind: str, what_if: WhatIf = WhatIf()) -> ModelSpec | str:
    """Return `spec` with attention of the given `kind`, or the reason why that is not possible.

    mha: one KV head per query head. mqa: one KV head. gqa: the requested number of KV heads, else the model's own, else
    the largest divisor of the heads from 8 down to 2. mla: the requested ranks, else the model's own, else 4 * head_dim
    and head_dim / 2, as in the DeepSeek-V2 paper (section 2.1.4). Keys and values keep their widths: an MLA model as
    MHA stores heads * (qk_nope + qk_rope + v) elements per token.
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
    """Return the reason why the model has no variant of this kind, or None if it has one."""
    if not spec.attention.num_heads:
        return "the model has no attention"
    if any(isinstance(cache, CompressedAttention) for cache in all_caches(spec)):
        return "variants of a model with compressed attention are not defined"
    if kind == "mla" and has_cross_attention(spec):
        return "no published model uses a latent for an encoder's output"
    return None


@remembered
def side_by_side(spec: ModelSpec, what_if: WhatIf) -> list[tuple[str, ModelSpec | str]]:
    """Return `variant` for every kind, in order. For the kind that `what_if` requests, its options apply."""
    requested = what_if.kind
    return [(kind, variant(spec, kind, what_if if kind == requested else WhatIf())) for kind in VARIANTS]


@remembered
def layer_parameters(spec: ModelSpec) -> int | None:
    """Return the parameters of one attention module's matrices (`Attention.parameters`).

    None if the layers differ, if a layer keeps more than one cache, or if a layer has an indexer.
    """
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


def _grouped(shape: AttentionShape, kind: str, requested: int | None) -> AttentionShape | str:
    heads = shape.num_heads
    if kind == "mha":
        if requested not in (None, heads):
            return f"mha has one KV head per query head ({heads}), not {requested}"
        num_kv_heads = heads
    elif kind == "mqa":
        num_kv_heads = 1
    elif requested is not None:
        if heads % requested:
            return f"{requested} KV heads do not divide {heads} heads"
        num_kv_heads = requested
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
            return f"head_dim {shape.v_head_dim} is odd, and the rotary key needs half of it"
        rank, rope = 4 * shape.v_head_dim, shape.v_head_dim // 2
        # The width of the head becomes the part without positions. The rotary part is added to it.
        nope = shape.qk_head_dim
    return _with_latent(shape, nope, what_if.kv_lora_rank or rank, what_if.qk_rope_head_dim or rope)


def _changed(spec: ModelSpec, changed: AttentionShape) -> ModelSpec:
    """Return `spec` with all attention modules changed in the same way as its main one."""
    new = map_attention(spec, lambda mixer: _changed_mixer(mixer, spec.attention, changed))
    groups = (group._replace(caches=tuple(map(_as_bound, group.caches, group.layer.caches))) for group in new.layers)
    return new._replace(attention=changed, layers=tuple(groups))


def _changed_mixer(mixer: Attention, own: AttentionShape, changed: AttentionShape) -> Attention:
    """Return `mixer` with the changed attention. It keeps its own window, and its own widths of keys and values."""
    shape = mixer.shape
    if not changed.is_latent:
        new = _with_heads(shape, shape.num_heads if changed.kind == "mha" else changed.num_kv_heads)
    elif shape.v_head_dim == own.v_head_dim:
        new = _with_latent(shape, changed.qk_nope_head_dim, changed.kv_lora_rank, changed.qk_rope_head_dim)
    else:
        # The layer's heads differ in width from the main ones, so use the default ranks for its own width.
        new = _with_latent(shape, shape.qk_head_dim, 4 * shape.v_head_dim, shape.v_head_dim // 2)
    return mixer._replace(most_read_tokens=None, shape=new)


def _with_heads(shape: AttentionShape, num_kv_heads: int) -> AttentionShape:
    return shape._replace(num_kv_heads=num_kv_heads, kv_lora_rank=0, q_lora_rank=0, qk_rope_head_dim=0)


def _with_latent(shape: AttentionShape, nope: int, rank: int, rope: int) -> AttentionShape:
    return shape._replace(
        num_kv_heads=shape.num_heads, qk_head_dim=nope + rope, kv_lora_rank=rank, qk_rope_head_dim=rope, rope_dim=rope
    )


def _as_bound(old: Cache, new: Cache) -> Cache:
    """Return the cache of a changed layer with the workload's values from the old cache."""
    if isinstance(old, RecurrentState):
        return old
    if isinstance(old, CrossAttention) and isinstance(new, CrossAttention):
        return new._replace(encoder_tokens=old.encoder_tokens)
    return new
