"""DeepSeek-V4: one key and value for all heads, compressors, indexers, and streams mixed between layers."""

from __future__ import annotations

from kvcalc.model.families.deepseek_v4 import compress_rates, layer_kinds
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import OTHER, Block, ModelWeights, Weight, around, linear, norm, other

# Source: DeepseekV4Config, Transformers 5.23.0.
_DEFAULTS = {
    "vocab_size": 129280, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "hc_mult": 4, "index_n_heads": 64,
}  # fmt: skip
_EXPERTS = Experts("n_routed_experts", shared=True)
_PREFIX = "model.layers.{}."
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: DeepseekV4DecoderLayer and what it holds, Transformers 5.23.0."""
    # One width under two names.
    inner = config.optional_integer("moe_intermediate_size", "intermediate_size") or 2048
    config = with_defaults(config, {**_DEFAULTS, "moe_intermediate_size": inner})
    for key in ("attention_bias", "mlp_bias"):
        config.refuse(key, "biases of this family are not counted")
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    kinds, rates = layer_kinds(config, num_layers), compress_rates(config)
    streams = config.integer("hc_mult")
    layer = (
        *_attention(config, width),
        *_mixing("attn_hc", width, streams),
        *_mixing("ffn_hc", width, streams),
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
        *moe(config, _EXPERTS, width),
    )
    heavy = _compressor("self_attn.compressor", width, config.integer("head_dim"), rates[_HEAVY], 1)
    sparse = (
        *_compressor("self_attn.compressor", width, config.integer("head_dim"), rates[_SPARSE], 2),
        *_indexer(config, width, rates[_SPARSE]),
    )
    blocks = (
        Block(_PREFIX, range(num_layers), layer),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind == _HEAVY], heavy),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind == _SPARSE], sparse),
    )
    outer = (
        norm("model.norm", width),
        Weight("model.hc_head.hc_fn", streams, streams * width, OTHER),
        other("model.hc_head.hc_base", streams),
        other("model.hc_head.hc_scale", 1),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, *outer)
    return ModelWeights(embedding, tied, (*blocks, ends))


def _attention(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """The output is projected in groups of heads, each through its own low rank."""
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    rank, groups, o_rank = config.integer("q_lora_rank"), config.integer("o_groups"), config.integer("o_lora_rank")
    return (
        linear("self_attn.q_a_proj", width, rank),
        norm("self_attn.q_a_norm", rank),
        linear("self_attn.q_b_proj", rank, heads * head_dim),
        linear("self_attn.kv_proj", width, head_dim),
        norm("self_attn.kv_norm", head_dim),
        linear("self_attn.o_a_proj", heads * head_dim // groups, groups * o_rank),
        linear("self_attn.o_b_proj", groups * o_rank, width),
        other("self_attn.sinks", heads),
    )


def _mixing(name: str, width: int, streams: int) -> tuple[Weight, ...]:
    """What joins the streams into a block's input and spreads its output over them (manifold hyper-connections)."""
    mixes = streams * (2 + streams)
    return (
        Weight(f"{name}.fn", mixes, streams * width, OTHER),
        other(f"{name}.base", mixes),
        other(f"{name}.scale", 3),
    )


def _compressor(prefix: str, width: int, head_dim: int, rate: int, overlap: int) -> tuple[Weight, ...]:
    """`rate` tokens become an entry; where entries overlap by half both halves have projections of their own."""
    inner = overlap * head_dim
    return (
        linear(f"{prefix}.kv_proj", width, inner),
        linear(f"{prefix}.gate_proj", width, inner),
        norm(f"{prefix}.kv_norm", head_dim),
        other(f"{prefix}.position_bias", rate * inner),
    )


def _indexer(config: ConfigReader, width: int, rate: int) -> tuple[Weight, ...]:
    heads, head_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
    prefix = "self_attn.compressor.indexer"
    return (
        *_compressor(prefix, width, head_dim, rate, 2),
        linear(f"{prefix}.q_b_proj", config.integer("q_lora_rank"), heads * head_dim),
        linear(f"{prefix}.scorer.weights_proj", width, heads)._replace(role=OTHER),
    )
