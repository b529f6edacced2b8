"""What one step of a model reads and computes: bytes and operations, before any device is known.

Everything here is arithmetic on the model; nothing is fitted. `Counts` is made once per model, dtypes and layout; the
steps of any batch and context are then sums over a few rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import read_cache_bytes
from kvcalc.memory.weights import embedding_bytes, matrices
from kvcalc.model.caches import (
    Cache,
    CompressedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
)
from kvcalc.model.spec import ModelSpec
from kvcalc.model.weights.tensors import EMBEDDING, HEAD, LINEAR, LOOKUP, ROUTER, ModelWeights

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme

# MLA's down-projections have no heads to split, so every tensor-parallel rank holds them whole (DeepSeek-V2, 2.1).
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "fused_qkv_a_proj")


class Layout(NamedTuple):
    """How the model lies on its devices. Whole experts are dealt out over `expert_parallel_size` of the ranks."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Experts(NamedTuple):
    """`experts` experts a layer, of which one token reads `read`; bytes and elements of one, summed over the layers."""

    experts: int
    read: int
    expert_bytes: int
    expert_elements: int

    def touched(self, tokens: float) -> float:
        """Distinct experts of one layer that `tokens` tokens are sent to, each choosing evenly: E (1 - (1 - k/E)^n)."""
        missed: float = (1.0 - self.read / self.experts) ** tokens
        return self.experts * (1.0 - missed)


class Reads(NamedTuple):
    """One kind of cache over all its layers: what a decode step of one sequence reads and computes at a context.

    `bytes_per_token` times the context, which counts up to `most_tokens`, plus `fixed_bytes`. `decode_flops` and
    `prefill_flops` are for one query token and one cached token.
    """

    layers: int
    bytes_per_token: int
    fixed_bytes: int
    most_tokens: int | None
    decode_flops: int
    prefill_flops: int
    cache: Cache
    is_linear: bool = True

    def tokens(self, context_tokens: float) -> float:
        return context_tokens if self.most_tokens is None else min(context_tokens, self.most_tokens)


class Counts(NamedTuple):
    """What the whole model reads and computes, before it is split over devices.

    `split_bytes` are divided by the tensor-parallel size, `whole_bytes` are read on every rank. `reads` is one rank's.
    `dense_elements` are multiplied with every token, `head_elements` with the tokens that are sampled from alone.
    `stored_bytes`: all weights, what a step does not read too.
    """

    num_layers: int
    moe_layers: int
    attention_layers: int
    hidden_size: int
    split_bytes: int
    whole_bytes: int
    head_bytes: int
    dense_elements: int
    head_elements: int
    stored_bytes: int
    experts: tuple[Experts, ...]
    reads: tuple[Reads, ...]
    kv_dtype: Dtype
    layout: Layout

    def kv_read_bytes(self, context_tokens: float) -> float:
        """Bytes of cache one decode step of one sequence reads on one rank, all layers (`decode_read_bytes`)."""
        total = 0.0
        for row in self.reads:
            if row.is_linear:
                total += row.bytes_per_token * row.tokens(context_tokens) + row.fixed_bytes
            else:
                total += row.layers * read_cache_bytes(row.cache, max(1, int(context_tokens)), self.kv_dtype)
        return total

    def attention_flops(self, context_tokens: float) -> float:
        """Operations of the attention scores and their sum, one query token of one sequence, on one rank."""
        return sum(row.decode_flops * row.tokens(context_tokens) for row in self.reads)

    def prefill_attention_flops(self, tokens: float) -> float:
        """The same for a whole causal prompt: the quadratic part, where a window bounds it n x window."""
        total = 0.0
        for row in self.reads:
            most = row.tokens(tokens)
            total += row.prefill_flops * (most * (most + 1) / 2 + (tokens - most) * most)
        return total

    def expert_bytes(self, tokens: float) -> float:
        """Bytes of the distinct experts `tokens` tokens touch, all layers, before they are split."""
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
    """Counts of a model whose weights lie in `base`, in `linear` or by `scheme` (see `kvcalc.memory.weights`).

    A step reads every weight but the tables it takes one row of; the input embedding only where it is the output head.
    """
    split = whole = head_bytes = dense = head_elements = 0
    stored = embedding_bytes(weights, base, scheme)
    experts: dict[tuple[int, int], list[int]] = {}
    moe_layers = 0
    for weight, layers, one_bytes in matrices(weights, base, linear, scheme):
        elements = weight.rows * weight.columns
        stored += layers * weight.copies * one_bytes
        if weight.role in (LOOKUP, EMBEDDING) or not weight.read:
            continue
        if weight.role == ROUTER and weight.rows > 1:
            moe_layers += layers
        if weight.copies > 1:
            row = experts.setdefault((weight.copies, min(weight.read, weight.copies)), [0, 0])
            row[0] += layers * one_bytes
            row[1] += layers * elements
            continue
        if weight.role == HEAD:
            head_bytes += one_bytes
            head_elements += elements
            continue
        if weight.role == LINEAR and weight.name.rpartition(".")[2] not in _REPLICATED:
            split += layers * one_bytes
        else:
            whole += layers * one_bytes
        if weight.role in (LINEAR, ROUTER):
            dense += layers * elements
    if weights.tied:
        head_bytes += embedding_bytes(weights, base, scheme)
        head_elements += weights.embedding.parameters
    return Counts(
        num_layers=spec.num_layers,
        moe_layers=moe_layers,
        attention_layers=sum(group.num_layers for group in spec.layers if group.caches),
        hidden_size=spec.attention.hidden_size or weights.embedding.columns,
        split_bytes=split,
        whole_bytes=whole,
        head_bytes=head_bytes,
        dense_elements=dense,
        head_elements=head_elements,
        stored_bytes=stored,
        experts=tuple(Experts(*key, *row) for key, row in experts.items()),
        reads=tuple(_reads(spec, kv_dtype, layout.tensor_parallel_size)),
        kv_dtype=kv_dtype,
        layout=layout,
    )


def _reads(spec: ModelSpec, dtype: Dtype, tensor_parallel_size: int) -> list[Reads]:
    """One row per distinct cache on one rank. Caches of different kinds may compare equal, so the kind is a key."""
    layers: dict[tuple[str, Cache], int] = {}
    for group in spec.layers:
        for cache in group.caches:
            share = cache.on_device(tensor_parallel_size)
            layers[share.kind, share] = layers.get((share.kind, share), 0) + group.num_layers
    return [_row(spec, cache, times, dtype, tensor_parallel_size) for (_, cache), times in layers.items()]


def _row(spec: ModelSpec, cache: Cache, layers: int, dtype: Dtype, size: int) -> Reads:
    heads = max(1, spec.attention.num_heads // size)
    if isinstance(cache, (RecurrentState, CrossAttention)):
        fixed = layers * read_cache_bytes(cache, 1, dtype)
        # Every element of a state is read, decayed, added to and summed: about six operations.
        flops = 6 * layers * cache.state_elements if isinstance(cache, RecurrentState) else 0
        return Reads(layers, 0, fixed, 1, flops, 0, cache)
    if isinstance(cache, CompressedAttention):
        flops = layers * 4 * heads * cache.token_rows()[0]
        return Reads(layers, 0, 0, cache.window, flops, flops, cache, is_linear=False)
    most = cache.window
    if isinstance(cache, (FullAttention, LatentAttention)) and cache.most_read_tokens is not None:
        most = min(most or cache.most_read_tokens, cache.most_read_tokens)
    # A block's rows are whole (`check_rows`), so a token's bytes are whole too; a window of one token is one token.
    one = layers * read_cache_bytes(cache, 1, dtype)
    shape = spec.attention
    if isinstance(cache, LatentAttention):
        # Decode attends to the latent itself (absorbed); prefill to the keys and values rebuilt from it.
        decode = 2 * heads * (2 * cache.kv_lora_rank + cache.qk_rope_head_dim)
        prefill = 2 * heads * (shape.qk_head_dim + shape.v_head_dim)
    elif isinstance(cache, IndexerKeys):
        index_heads = spec.config.get("index_n_heads")
        decode = prefill = 2 * cache.head_dim * (index_heads if isinstance(index_heads, int) else 1)
    else:
        decode = prefill = 2 * heads * (cache.k_head_dim + cache.v_head_dim)
    return Reads(layers, one, 0, most, layers * decode, layers * prefill, cache)
