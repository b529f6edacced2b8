"""The attention computation: softmax(q k^T / sqrt(d)) v. All heads of a group read one copy of K and V.

The query heads of a group become additional query rows of their one KV head, so K and V are read once per group and are
never repeated. Copying them for every head, as `repeat_kv` does, loses the bandwidth that GQA and MQA save.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""torch's kernels for CUDA, but not cuDNN's, which makes a new plan for every length, for tens of milliseconds."""


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    kernels: list[SDPBackend] = ANY_LENGTH,
) -> Tensor:
    """Attention of H query heads over G KV heads. G divides H, and head i (from 0) reads group i // (H / G).

    query is (B, H, q, d), key (B, G, s, d) and value (B, G, s, e). Returns (B, H, q, e). `mask` is None or boolean. It
    is True at positions that a query may not attend to, can be broadcast to (B, H, q, s), and is the same for all
    heads. A row whose keys are all masked gives zeros. One query over a cache needs no mask. Never use SDPA's is_causal
    for it, because that is aligned to the first key. `scale` replaces 1 / sqrt(d). On CUDA, one of `kernels` runs.
    Raises RuntimeError if none of them can.
    """
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * queries, width)
    may_attend = None
    if mask is not None:
        # Repeated for the query heads of a group: (B or 1, 1, group_size * q or 1, s).
        may_attend = ~(mask if mask.shape[-2] == 1 else mask.repeat(1, 1, heads // groups, 1))
    out = _sdpa(rows, key, value, kernels, attn_mask=may_attend, dropout_p=dropout, scale=scale)
    out = out.reshape(batch, heads, queries, value.shape[-1])
    return out if mask is None else out.masked_fill(mask.all(dim=-1, keepdim=True), 0.0)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of a prompt over itself: query (B, H, n, d) over key and value (B, G, n, d), without a mask.

    K and V are repeated for all heads, because a prompt's attention is limited by compute, and fused causal kernels
    skip half of the work. Raises ValueError if the numbers of queries and keys differ.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: the causal flag is aligned to the first key"
        )
    if query.shape[1] != key.shape[1]:
        key, value = repeat_heads(query, key, value)
    return _sdpa(query, key, value, ANY_LENGTH, is_causal=True, scale=scale)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, kernels: list[SDPBackend], **options: Any) -> Tensor:
    missing = key.shape[-1] - value.shape[-1]
    if query.device.type == "cpu" and missing > 0 and query.shape[-2] > key.shape[-1]:
        # torch's fused kernel for CPUs needs V as wide as K. Without it, all scores are written to memory, which are
        # more than a copy of V if there are more queries than columns of K.
        out = F.scaled_dot_product_attention(query, key, F.pad(value, (0, missing)), **options)
        return out[..., : value.shape[-1]]
    if query.device.type != "cuda":
        return F.scaled_dot_product_attention(query, key, value, **options)
    with sdpa_kernel(kernels):
        return F.scaled_dot_product_attention(query, key, value, **options)


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Like `grouped_attention`, but in separate operations: scores, softmax in fp32, weighted sum."""
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * queries, width)
    scores = rows @ key.transpose(-1, -2) * (width**-0.5 if scale is None else scale)
    scores = scores.reshape(batch, heads, queries, key.shape[2]).float()
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    if mask is not None:
        # The softmax of a row with only -inf is NaN. Such a row attends to nothing.
        weights = weights.masked_fill(mask.all(dim=-1, keepdim=True), 0.0)
    weights = weights.to(query.dtype)
    out = weights.reshape(batch, groups, heads // groups * queries, key.shape[2]) @ value
    return out.reshape(batch, heads, queries, value.shape[-1])


def repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of `key` and `value`, repeated to one head per head of `query`."""
    each = query.shape[1] // key.shape[1]
    return key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """View (batch, tokens, heads * width) as (batch, heads, tokens, width)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)
