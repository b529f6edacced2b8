"""Liquid's LFM2: short convolutions and attention, with an MLP or, after the first layers, experts."""

from __future__ import annotations

from kvcalc.model.families.lfm2 import layer_kinds
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import Block, ModelWeights, Weight, around, grouped_attention, linear, norm, other

# Source: Lfm2Config and Lfm2MoeConfig, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "lfm2": {"vocab_size": 65536},
    "lfm2_moe": {
        "vocab_size": 65536, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4,
    },
}  # fmt: skip
_EXPERTS = Experts("num_experts", prefix="feed_forward", names=("w1", "w3", "w2"))
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: Lfm2DecoderLayer and Lfm2MoeDecoderLayer, Transformers 5.23.0."""
    config = config.with_defaults(_DEFAULTS[model_type])
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    kinds = layer_kinds(config, model_type, num_layers)
    dense, sparse = num_layers, 0
    if model_type == "lfm2_moe":
        dense = min(config.integer("num_dense_layers", least=0), num_layers)
        sparse = num_layers - dense
    blocks = [
        Block(_PREFIX, range(num_layers), (norm("operator_norm", width), norm("ffn_norm", width))),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind == "conv"], _convolution(config, width)),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind != "conv"], _attention(config, width)),
        Block(_PREFIX, range(dense), _mlp(width, _inner(config, model_type))),
    ]
    if sparse:
        blocks.append(Block(_PREFIX, range(dense, num_layers), moe(config, _EXPERTS, width)))
    tied = config.boolean("tie_embedding", default=config.boolean("tie_word_embeddings", default=True))
    embedding, ends = around(vocab, width, tied, norm("model.embedding_norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _convolution(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    bias = config.boolean("conv_bias", default=False)
    return (
        linear("conv.in_proj", width, 3 * width, bias),
        linear("conv.out_proj", width, width, bias),
        other("conv.conv", width * (config.integer("conv_L_cache") + bias)),
    )


def _attention(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    heads = config.integer("num_attention_heads")
    head_dim = config.head_dim(width, heads)
    query, key, value, output = grouped_attention(
        "self_attn", width, heads, config.integer("num_key_value_heads"), head_dim
    )
    norms = (norm("self_attn.q_layernorm", head_dim), norm("self_attn.k_layernorm", head_dim))
    return (query, key, value, output._replace(name="self_attn.out_proj"), *norms)


def _mlp(width: int, inner: int) -> tuple[Weight, ...]:
    return (
        linear("feed_forward.w1", width, inner),
        linear("feed_forward.w3", width, inner),
        linear("feed_forward.w2", inner, width),
    )


def _inner(config: ConfigReader, model_type: str) -> int:
    """LFM2 takes two thirds of what is stated, times a factor, rounded up to a multiple. Source: Lfm2MLP."""
    if model_type == "lfm2_moe":
        return config.integer("intermediate_size")
    inner = config.optional_integer("block_ff_dim") or config.optional_integer("intermediate_size") or 12288
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = 2 * inner // 3
    if "block_ffn_dim_multiplier" in config.config and config.config["block_ffn_dim_multiplier"] is None:
        return inner
    multiple = config.optional_integer("block_multiple_of") or 256
    inner = int(config.number("block_ffn_dim_multiplier", default=1.0) * inner)
    return -(-inner // multiple) * multiple
