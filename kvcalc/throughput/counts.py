"""The bytes that one step of a model reads, and the operations it computes. Both are independent of the device.

Everything here is arithmetic on the model. Nothing is fitted. `Counts` is built once per model, dtypes and layout. The
cost of a step with any batch and context is then a sum over a few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.sharding import shard
from kvcalc.memory.weights import embedding_bytes, matrices
from kvcalc.model.caches import HEADS_CACHES, Cache, RecurrentState, most_read
from kvcalc.model.layout import Layout
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP, ROUTER, Block, ModelWeights, Weight
from kvcalc.records import NamedTuple
from kvcalc.throughput.choices import distinct_experts
from kvcalc.throughput.constants import weight_class
from kvcalc.throughput.launches import count_launches, is_output

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme
    from kvcalc.memory.reads import Reads
    from kvcalc.throughput.adapters import Adapters


class Matrices(NamedTuple):
    """The matrices on one rank whose weights are read by the kernels of one type (`weight_class`)."""

    kind: str
    bytes: int
    elements: int


class Experts(NamedTuple):
    """`experts` experts per layer, of which one token reads `read`. `matrices` are one expert's in all layers.

    `moved` is the number of activations that the products of one token with one expert read and write in all layers. It
    is the mean of the ranks.
    """

    experts: int
    read: int
    matrices: tuple[Matrices, ...]
    moved: float = 0.0

    def touched(self, tokens: float) -> float:
        """The expected number of distinct experts in one layer for `tokens` tokens."""
        return distinct_experts(self.experts, self.read, tokens)


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

    Every step reads `dense` and `head`. Every token is multiplied with `dense`, and only sampled tokens with `head`.
    `moe_layers` is the number of layers with experts.
    `launches` is the fixed cost of the kernels of a step (`kvcalc.throughput.launches`). `kv_heads` is the number of KV
    heads that one token adds on the rank, over all layers (MLA: none). `reads` is what a step reads of the rank's
    cache. `moved` is the number of activations of one token inside attention and MLPs that the products of all dense
    layers read or write. Tensor-parallel ranks divide them, but not the hidden states. `launches` includes those of
    `adapters`, if the server has any.
    """

    num_layers: int
    moe_layers: int
    attention_layers: int
    hidden_size: int
    launches: int
    kv_heads: int
    dense: tuple[Matrices, ...]
    head: tuple[Matrices, ...]
    experts: tuple[Experts, ...]
    work: tuple[Work, ...]
    reads: Reads
    layout: Layout
    moved: float = 0.0
    adapters: Adapters | None = None

    def with_adapters(self, adapters: Adapters) -> Counts:
        """The same model on a server with LoRA adapters."""
        return self._replace(adapters=adapters, launches=self.launches + adapters.launches)

    def kv_read_bytes(self, context_tokens: float) -> float:
        """Bytes of cache that one decode step of one sequence reads on the rank in all layers (`decode_read_bytes`)."""
        if self.layout.token_ranks > 1:
            context_tokens = max(1.0, context_tokens / self.layout.token_ranks)
        return self.reads.bytes_at(context_tokens)

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


class HostPart(NamedTuple):
    """The part of the model in host memory, and the speed of the host.

    `counts` are those of the host's layers and experts. `switches` are the changes between the host and the device in
    one step. `bandwidth` is the theoretical rate in bytes per second, and `is_default_bandwidth` whether it is assumed.
    `ubatch_tokens` is the size of a micro-batch.
    """

    counts: Counts
    switches: int
    bandwidth: float
    is_default_bandwidth: bool
    ubatch_tokens: int


def bytes_of(matrices: tuple[Matrices, ...]) -> int:
    """Bytes of the matrices of all types."""
    return sum(each.bytes for each in matrices)


def count(
    spec: ModelSpec,
    weights: ModelWeights,
    base: Dtype,
    reads: Reads,
    layout: Layout = Layout(),
    linear: Dtype | None = None,
    scheme: Scheme | None = None,
    spread_names: frozenset[str] = frozenset(),
) -> Counts:
    """The counts of a model with weights in `base`, `linear` or `scheme` (see `kvcalc.memory.weights`).

    The experts and the weights named in `spread_names` are split over the devices of all copies of the attention.

    `reads` is what a step reads of one rank's cache, as the engine stores it (`Engine.reads`).
    A step reads every weight except the tables from which it takes one row. It reads the whole input embedding only if
    that is also the output head.
    """
    ranks = layout.tensor_parallel_size
    # An expert counts as split over all ranks, which is the mean of the groups.
    held = shard(weights, layout._replace(expert_parallel_size=1), spread_names)
    share = on_device(spec, ranks)
    dense, head = _Sum(), _Sum()
    experts: dict[tuple[int, int], _Sum] = {}
    moved: dict[tuple[int, int], float] = {}
    whole = {weight.name: weight for block in weights.blocks for weight in block.weights}
    moe_layers, dense_moved = 0, 0.0
    for weight, layers, one_bytes, stored in matrices(held, base, linear, scheme):
        # A weight that is spread gets the tokens of all DP ranks.
        elements = weight.rows * weight.columns * (layout.attention_copies if weight.name in spread_names else 1)
        if weight.role in (LOOKUP, EMBEDDING) or not weight.read:
            continue
        if weight.role == ROUTER and weight.rows > 1:
            moe_layers += layers
        # A product reads or writes the hidden state on its outside.
        outside = whole[weight.name].rows if is_output(weight.name) else whole[weight.name].columns
        if weight.copies > 1:
            key = weight.copies, min(weight.read, weight.copies)
            experts.setdefault(key, _Sum()).add(stored, layers * one_bytes, layers * elements)
            # An expert is split along its inside, and each of its ranks has the whole input or output of a token. So do
            # ranks without the expert: the kernel fills their rows with zeros, and all rows are summed
            # (fused_moe_kernel, model_executor/layers/fused_moe/fused_moe.py of vLLM 0.33.0). Only the all-to-alls of
            # DP ranks send a rank no more than its experts need.
            senders = layout.expert_parallel_size if layout.attention_copies > 1 else 1
            moved[key] = moved.get(key, 0.0) + layers * (outside / senders + weight.rows * weight.columns / outside)
        elif weight.role == HEAD:
            head.add(stored, one_bytes, elements)
        else:
            dense.add(stored, layers * one_bytes, layers * elements if weight.role in (LINEAR, ROUTER) else 0)
            dense_moved += layers * elements / outside if weight.role == LINEAR else 0
    if weights.tied:
        form = scheme.embedding[True] if scheme is not None and scheme.embedding is not None else None
        name = base.name if form is None else form.name
        head.add(name, embedding_bytes(held, base, scheme), held.embedding.parameters)

    def is_quantized(block: Block, weight: Weight) -> bool:
        """Whether the weight is stored in a float type of 8 or 4 bits, whose input is quantised too."""
        form = None if scheme is None else scheme.format_of(block.prefix.format(block.numbers[0]) + weight.name, LINEAR)
        name = form.name if form is not None else linear.name if linear is not None else base.name
        return weight_class(name) in ("fp8", "nvfp4")

    return Counts(
        num_layers=spec.num_layers,
        moe_layers=moe_layers,
        attention_layers=sum(group.num_layers for group in spec.layers if group.caches),
        hidden_size=spec.attention.hidden_size or weights.embedding.columns,
        launches=count_launches(spec, held, is_quantized),
        kv_heads=sum(group.num_layers * _kv_heads(group.caches) for group in share.layers),
        dense=dense.found(),
        head=head.found(),
        experts=tuple(Experts(*key, row.found(), moved[key]) for key, row in experts.items()),
        work=tuple(_work(spec, ranks)),
        reads=reads,
        layout=layout,
        moved=dense_moved,
    )


class _Sum:
    """Matrices summed by type."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}

    def add(self, stored: str, size: int, elements: int) -> None:
        row = self._rows.setdefault(weight_class(stored), [0, 0])
        row[0] += size
        row[1] += elements

    def found(self) -> tuple[Matrices, ...]:
        return tuple(Matrices(kind, *row) for kind, row in self._rows.items())


def _kv_heads(caches: tuple[Cache, ...]) -> int:
    return sum(cache.num_kv_heads for cache in caches if isinstance(cache, HEADS_CACHES))


def _work(spec: ModelSpec, ranks: int) -> list[Work]:
    """One row for each distinct limit on the number of tokens that a layer reads."""
    work: dict[int | None, list[int]] = {}
    for group in spec.layers:
        for cache, (decode, prefill) in zip(group.caches, group.layer.flops(ranks)):
            # A state counts as one token.
            most = 1 if isinstance(cache, RecurrentState) else most_read(cache)
            row = work.setdefault(most, [0, 0])
            row[0] += group.num_layers * decode
            row[1] += group.num_layers * prefill
    return [Work(decode, prefill, most) for most, (decode, prefill) in work.items()]
