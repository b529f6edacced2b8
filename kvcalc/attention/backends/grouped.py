"""Plain PyTorch: the query heads of a group as query rows of their one KV head, fused or in plain matrix products."""

from __future__ import annotations

from torch import Tensor

from kvcalc.attention.backends.base import Backend
from kvcalc.attention.core import grouped_attention


class GroupedSdpa(Backend):
    """torch's scaled_dot_product_attention over one copy of K and V, without a causal flag."""

    name = "grouped-sdpa"

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return grouped_attention(query, key, value, scale=scale)


class GroupedMatmul(Backend):
    """Two batched matrix products with a softmax in fp32 between them: on some devices faster for one query."""

    name = "grouped-matmul"


class RepeatKv(Backend):
    """K and V materialised once per query head before attention: what grouping exists to avoid, as a baseline."""

    name = "repeat-kv"
    is_candidate = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        each = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)
        return grouped_attention(query, key, value, scale=scale)
