"""The bytes that one step of a model reads, and the operations it computes. Both are independent of the device.

Everything here is arithmetic on the model. Nothing is fitted. `Counts` is built once per model, dtypes and layout. The
cost of a step with any batch and context is then a sum over a few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcalc.memory.curves import Curve, most_read, read_curve, read_sequence_bytes
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.sharding import Spread, shard
from kvcalc.memory.weights import embedding_bytes, matrices
from kvcalc.model.caches import RecurrentState
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP, ROUTER, ModelWeights

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme


class Layout(NamedTuple):
    """How the model is split over devices. Whole experts are distributed over `expert_parallel_size` ranks.

    Each of `data_parallel_size` attention replicas is split over `tensor_parallel_size` devices. The experts and the
    weights named in `spread_names` are split over `ranks` devices, those of all attention replicas.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    data_parallel_size: int = 1
    spread_names: frozenset[str] = frozenset()

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def devices(self) -> int:
        return self.ranks * self.pipeline_parallel_size


class Experts(NamedTuple):
    """`experts` experts per layer, of which one token reads `read`.

    `expert_bytes` and `expert_elements` are those of one expert, summed over the layers.
    """

    experts: int
    read: int
    expert_bytes: int
    expert_elements: int

    def touched(self, tokens: float) -> float:
        """The expected number of distinct experts in one layer for `tokens` tokens: E (1 - (1 - k/E)^n).

        Every token chooses its experts with equal probability.
        """
        missed: float = (1.0 - self.read / self.experts) ** tokens
        return self.experts * (1.0 - missed)


class Work(NamedTuple):
    """The attention work of one kind of cache, over all its layers on one rank.

    The operations are per query token and cached token. At most `most_tokens` cached tokens count.
    """

    decode_flops: int
    prefill_flops: int
    most_tokens: int | None

    def tokens(self, context_tokens: float) -> float:
        return context_tokens if self.most_tokens is None else min(context_tokens, self.most_tokens)


class Counts(NamedTuple):
    """What one tensor-parallel rank reads and computes in all layers, for its shard of the weights and the cache.

    Every step reads `dense_bytes`. Every token is multiplied with `dense_elements`, and only sampled tokens with
    `head_elements`. `cache` is the rank's share of the model, whose cache is in `kv_dtype`. `curve` gives the cache
    bytes that a step reads, or is None if they are not piecewise linear.
    """

    num_layers: int
    moe_layers: int
    attention_layers: int
    hidden_size: int
    dense_bytes: int
    head_bytes: int
    dense_elements: int
    head_elements: int
    experts: tuple[Experts, ...]
    work: tuple[Work, ...]
    cache: ModelSpec
    curve: Curve | None
    kv_dtype: Dtype
    layout: Layout

    def kv_read_bytes(self, context_tokens: float) -> float:
        """Bytes of cache that one decode step of one sequence reads on the rank in all layers (`decode_read_bytes`)."""
        if self.curve is not None:
            return self.curve.bytes_at(context_tokens)
        return read_sequence_bytes(self.cache, self.kv_dtype, max(1, int(context_tokens)))

    def attention_flops(self, context_tokens: float) -> float:
        """Operations of the attention scores and the weighted sum, for one query token of one sequence."""
        return sum(row.decode_flops * row.tokens(context_tokens) for row in self.work)

    def prefill_attention_flops(self, tokens: float) -> float:
        """The same for a whole causal prompt: quadratic in its length, or n x window if a window limits it."""
        total = 0.0
        for row in self.work:
            most = row.tokens(tokens)
            total += row.prefill_flops * (most * (most + 1) / 2 + (tokens - most) * most)
        return total

    def expert_bytes(self, tokens: float) -> float:
        """Bytes of the distinct experts that `tokens` tokens touch, in all layers."""
        return sum(row.touched(tokens) * row.expert_bytes for row in self.experts)

    def expert_elements_per_token(self) -> int:
        return sum(row.read * row.expert_elements for row in self.experts)


def count(
    spec: ModelSpec,
    weights: ModelWeights,
    base: Dtype,
    kv_dtype: Dtype,
    layout: Layout = Layout(),
    linear: Dtype | None = None,
    scheme: Scheme | None = None,
) -> Counts:
    """The counts of a model with weights in `base`, `linear` or `scheme` (see `kvcalc.memory.weights`).

    A step reads every weight except the tables from which it takes one row. It reads the whole input embedding only if
    that is also the output head.
    """
    ranks = layout.tensor_parallel_size
    spread = Spread(layout.data_parallel_size, names=layout.spread_names)
    held, share = shard(weights, ranks, spread), on_device(spec, ranks)
    dense_bytes = head_bytes = dense = head_elements = 0
    experts: dict[tuple[int, int], list[int]] = {}
    moe_layers = 0
    for weight, layers, one_bytes in matrices(held, base, linear, scheme):
        # A weight that is spread gets the tokens of all attention replicas.
        elements = weight.rows * weight.columns * (spread.data_parallel_size if weight.name in spread.names else 1)
        if weight.role in (LOOKUP, EMBEDDING) or not weight.read:
            continue
        if weight.role == ROUTER and weight.rows > 1:
            moe_layers += layers
        if weight.copies > 1:
            row = experts.setdefault((weight.copies, min(weight.read, weight.copies)), [0, 0])
            row[0] += layers * one_bytes
            row[1] += layers * elements
        elif weight.role == HEAD:
            head_bytes += one_bytes
            head_elements += elements
        else:
            dense_bytes += layers * one_bytes
            dense += layers * elements if weight.role in (LINEAR, ROUTER) else 0
    if weights.tied:
        head_bytes += embedding_bytes(held, base, scheme)
        head_elements += held.embedding.parameters
    return Counts(
        num_layers=spec.num_layers,
        moe_layers=moe_layers,
        attention_layers=sum(group.num_layers for group in spec.layers if group.caches),
        hidden_size=spec.attention.hidden_size or weights.embedding.columns,
        dense_bytes=dense_bytes,
        head_bytes=head_bytes,
        dense_elements=dense,
        head_elements=head_elements,
        experts=tuple(Experts(*key, *row) for key, row in experts.items()),
        work=tuple(_work(spec, ranks)),
        cache=share,
        curve=read_curve(share, kv_dtype),
        kv_dtype=kv_dtype,
        layout=layout,
    )


def _work(spec: ModelSpec, ranks: int) -> list[Work]:
    """One row for each distinct limit on the number of tokens that a layer reads."""
    found: dict[int | None, list[int]] = {}
    for group in spec.layers:
        for cache, (decode, prefill) in zip(group.caches, group.layer.flops(ranks)):
            # A state counts as one token.
            most = 1 if isinstance(cache, RecurrentState) else most_read(cache)
            row = found.setdefault(most, [0, 0])
            row[0] += group.num_layers * decode
            row[1] += group.num_layers * prefill
    return [Work(decode, prefill, most) for most, (decode, prefill) in found.items()]
