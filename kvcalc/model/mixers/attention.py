"""Attention modules: MHA, MQA, GQA and MLA, over all tokens, a window, a chunk or an encoder's output."""

from __future__ import annotations

from kvcalc.model.caches import (
    Cache,
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    SlidingWindowAttention,
)
from kvcalc.model.tensors import Weight, linear, norm, other, replicated
from kvcalc.records import NamedTuple

Flops = tuple[int, int]
"""Operations of a decode step and of a prefill, each for one query token and one cached token, on one rank."""


class AttentionShape(NamedTuple):
    """The dimensions of an attention module.

    `qk_head_dim` is the width of a query head and of a key head. With MLA it is qk_nope_head_dim + qk_rope_head_dim.
    `kv_lora_rank` is 0 if there is no latent, and `q_lora_rank` is 0 if the query is not compressed. `rope_dim` is the
    number of rotated dimensions per head, or 0 if positions are added elsewhere. `output_gate`: the input also gives a
    gate as wide as the output of the heads: the query projection has its rows (Qwen3-Next), or with MLA, a matrix of
    its own. `head_gate`: a matrix of its own gives one gate per head.
    """

    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    hidden_size: int | None
    qkv_bias: bool = False
    output_bias: bool = False
    rope_dim: int = 0
    rope_theta: float = 10_000.0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    output_gate: bool = False
    head_gate: bool = False

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def qk_nope_head_dim(self) -> int:
        return self.qk_head_dim - self.qk_rope_head_dim

    @property
    def kind(self) -> str:
        """`mla`, or `mha`, `mqa` or `gqa`, by the number of KV heads."""
        if self.is_latent:
            return "mla"
        if self.num_kv_heads == self.num_heads:
            return "mha"
        return "mqa" if self.num_kv_heads == 1 else "gqa"

    @property
    def query_rows(self) -> int:
        """Outputs of the query projection, including the output gate if it has none of its own."""
        gate = self.num_heads * self.v_head_dim if self.output_gate and not self.is_latent else 0
        return self.num_heads * self.qk_head_dim + gate


class Projections(NamedTuple):
    """The names of an attention module's weights in the checkpoint, and the weights beyond the four matrices.

    `fused` is the name of the one matrix that produces queries, keys and values, or empty if there are three matrices.
    `has_key` and `has_value` are False if a layer reads an earlier layer's K and V, or if K also serves as V.
    `reads_encoder`: keys and values were computed when the encoder ran, so a decode step does not read their
    projections. `qk_norm` is the kind of norm on queries and keys: one scale shared by all heads ("head"), the same
    with a shift ("head_bias"), or one scale as wide as all heads together ("width"). `has_sinks`: a weight for each
    head is one more term of its softmax. `caps_scores`: scores are limited by a tanh, which has no weight. `gate` is
    the name of the gate's matrix, if the gate has a matrix of its own.
    """

    prefix: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str = ""
    has_key: bool = True
    has_value: bool = True
    key_bias: bool = True
    reads_encoder: bool = False
    qk_norm: str = ""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    has_sinks: bool = False
    caps_scores: bool = False
    gate: str = "g_proj"


class Indexer(NamedTuple):
    """The indexer that picks the tokens a step reads. It has one key per token, scored by `num_heads` index heads."""

    num_heads: int
    head_dim: int
    weights: tuple[Weight, ...] = ()


class Attention(NamedTuple):
    """One attention module of a layer.

    `window` and `chunk` limit the tokens that it keeps. `is_cross`: it keeps K and V of an encoder's output. `keeps` is
    False if it reads an earlier layer's K and V; its indexer, if it has one, keeps its keys all the same.
    `most_read_tokens` is the number of tokens picked by an indexer, which may belong to this layer or to an earlier
    one.
    """

    shape: AttentionShape
    window: int | None = None
    chunk: int | None = None
    is_cross: bool = False
    keeps: bool = True
    most_read_tokens: int | None = None
    indexer: Indexer | None = None
    names: Projections = Projections()

    @property
    def caches(self) -> tuple[Cache, ...]:
        kept = (self._kept(),) if self.keeps else ()
        return kept if self.indexer is None else (*kept, IndexerKeys(self.indexer.head_dim))

    def _kept(self) -> Cache:
        shape = self.shape
        if shape.is_latent:
            window = self.window or self.chunk
            return LatentAttention(shape.kv_lora_rank, shape.qk_rope_head_dim, window, self.most_read_tokens)
        heads = shape.num_kv_heads, shape.qk_head_dim, shape.v_head_dim
        if self.is_cross:
            return CrossAttention(*heads)
        if self.chunk is not None:
            return ChunkedAttention(self.chunk, *heads)
        if self.window is not None:
            return SlidingWindowAttention(self.window, *heads)
        return FullAttention(*heads, self.most_read_tokens)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The projections, norms and sinks; empty if the model's width is not known."""
        if self.shape.hidden_size is None:
            return ()
        made = self._latent_weights() if self.shape.is_latent else self._grouped_weights()
        return made if self.indexer is None else (*made, *self.indexer.weights)

    @property
    def parameters(self) -> int | None:
        """Parameters of the module's matrices, without biases, norms and indexer. None if hidden_size is not known.

        Grouped: W_Q, W_K, W_V and W_O, which is 4 * hidden_size^2 if all widths are equal. MLA: the query (through its
        own low rank if the model has one), the joint down-projection of the latent and the rotary key, the two
        up-projections W_UK and W_UV, and W_O (DeepSeek-V2 paper, section 2.1 and appendix C).
        """
        if self.shape.hidden_size is None:
            return None
        return sum(w.rows * w.columns for w in self._replace(indexer=None).weights if w.columns > 1)

    @property
    def launches(self) -> int:
        """The kernels of a decode step besides the matrices and norms, in units of a small kernel (about 2 us).

        Grouped: the rotary embedding with the write to the cache, and the attention itself, which costs two. MLA: two
        batched products with the latent (two each), the rotary embedding, the write, and the attention (six). An
        indexer quantises queries and keys, scores all keys and picks the largest scores. Source: medians of kernel
        tables (aiconfigurator, commit 095f58a): attention 9 to 12 us, MLA 12 to 14 us, a product with the latent 4.3
        us, an indexer 31 to 36 us a layer with its matrices and more in a server.
        """
        launches = 12 if self.shape.is_latent else 3
        return launches + (18 if self.indexer is not None else 0)

    def flops(self, ranks: int) -> tuple[Flops, ...]:
        """Return the operations for each item of `caches`.

        With MLA, decode attends to the latent itself (absorbed) and prefill to the K and V rebuilt from it. Operations
        of cross-attention are not counted, because they depend on the encoder's length, not on the context.
        """
        if not self.keeps and self.indexer is None:
            return ()
        shape, heads = self.shape, max(1, self.shape.num_heads // ranks)
        prefill = 2 * heads * (shape.qk_head_dim + shape.v_head_dim)
        decode = 2 * heads * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim) if shape.is_latent else prefill
        sizes = (0, 0) if self.is_cross else (decode, prefill)
        if self.indexer is None:
            return (sizes,)
        scores = 2 * self.indexer.head_dim * self.indexer.num_heads
        if not self.keeps:
            return ((sizes[0] + scores, sizes[1] + scores),)
        return sizes, (scores, scores)

    def _grouped_weights(self) -> tuple[Weight, ...]:
        shape, names, width = self.shape, self.names, self.shape.hidden_size or 0
        prefix, heads = f"{names.prefix}." if names.prefix else "", shape.num_kv_heads
        keys, values = heads * shape.qk_head_dim, heads * shape.v_head_dim
        if names.fused:
            made = [
                linear(f"{prefix}{names.fused}", width, shape.query_rows + keys + values, shape.qkv_bias)._replace(
                    kv_heads=heads, kv_rows=keys + values
                )
            ]
        else:
            made = [linear(f"{prefix}{names.query}", width, shape.query_rows, shape.qkv_bias)]
            read = 0 if names.reads_encoder else 1
            for name, rows, is_there, bias in (
                (names.key, keys, names.has_key, shape.qkv_bias and names.key_bias),
                (names.value, values, names.has_value, shape.qkv_bias),
            ):
                if is_there:
                    matrix = linear(f"{prefix}{name}", width, rows, bias)
                    made.append(matrix._replace(kv_heads=heads, kv_rows=rows, read=read))
        made.append(linear(f"{prefix}{names.output}", shape.num_heads * shape.v_head_dim, width, shape.output_bias))
        made += self._gate_and_sinks(prefix)
        if names.qk_norm:
            is_wide, bias = names.qk_norm == "width", names.qk_norm == "head_bias"
            counts = (shape.num_heads, heads) if is_wide else (1, 1)
            for name, count, is_there in zip(names.qk_norms, counts, (True, names.has_key)):
                if is_there:
                    made.append(norm(f"{prefix}{name}", count * shape.qk_head_dim, bias))
        return tuple(made)

    def _latent_weights(self) -> tuple[Weight, ...]:
        """Return the weights of an MLA module.

        Biases belong to the down-projections and to the output projection (DeepseekV3Attention, Transformers 5.23.0).
        The down-projections have no heads, so every rank holds them whole (ReplicatedLinear in DeepseekV2MLAAttention,
        vLLM 0.33.0).
        """
        shape, width = self.shape, self.shape.hidden_size or 0
        prefix, rank, q_rank = f"{self.names.prefix}.", shape.kv_lora_rank, shape.q_lora_rank
        queries: tuple[Weight, ...] = (linear(f"{prefix}q_proj", width, shape.query_rows),)
        if q_rank:
            queries = (
                replicated(f"{prefix}q_a_proj", width, q_rank, shape.qkv_bias),
                norm(f"{prefix}q_a_layernorm", q_rank),
                linear(f"{prefix}q_b_proj", q_rank, shape.query_rows),
            )
        return (
            *queries,
            replicated(f"{prefix}kv_a_proj_with_mqa", width, rank + shape.qk_rope_head_dim, shape.qkv_bias),
            norm(f"{prefix}kv_a_layernorm", rank),
            linear(f"{prefix}kv_b_proj", rank, shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)),
            linear(f"{prefix}o_proj", shape.num_heads * shape.v_head_dim, width, shape.output_bias),
            *self._gate_and_sinks(prefix),
        )

    def _gate_and_sinks(self, prefix: str) -> tuple[Weight, ...]:
        """Return the gate of the output and the sinks, of which most modules have none."""
        shape, names = self.shape, self.names
        weights: tuple[Weight, ...] = ()
        if shape.head_gate or (shape.output_gate and shape.is_latent):
            rows = shape.num_heads * (1 if shape.head_gate else shape.v_head_dim)
            weights = (linear(f"{prefix}{names.gate}", shape.hidden_size or 0, rows),)
        return (*weights, other(f"{prefix}sinks", shape.num_heads)) if names.has_sinks else weights
