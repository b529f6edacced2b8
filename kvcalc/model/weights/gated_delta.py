"""Qwen3-Next and Qwen3.5: gated delta nets, and attention whose output is gated."""

from __future__ import annotations

from kvcalc.model.families.gated_delta import layer_types
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, sparse_layers, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    gated_mlp,
    grouped_attention,
    linear,
    norm,
    other,
    remaining,
)

# Source: Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "qwen3_next": {
        "vocab_size": 151936, "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {"vocab_size": 248320, "intermediate_size": 12288},
    "qwen3_5_moe_text": {
        "vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
# Qwen3.5's experts stand in every layer; Qwen3-Next's may be left out of some.
_EXPERTS = {
    "qwen3_next": Experts("num_experts", layers="step", gated_shared=True),
    "qwen3_5_moe_text": Experts("num_experts", gated_shared=True),
}
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: Qwen3NextDecoderLayer and Qwen3_5DecoderLayer, Transformers 5.23.0."""
    config = with_defaults(config, _DEFAULTS[model_type])
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    kinds = layer_types(config, num_layers)
    rule = _EXPERTS.get(model_type)
    sparse = [] if rule is None else sparse_layers(config, rule, num_layers)
    dense = remaining(num_layers, sparse)
    blocks = [
        Block(_PREFIX, range(num_layers), (norm("input_layernorm", width), norm("post_attention_layernorm", width))),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind == "full_attention"], _attention(config, width)),
        Block(
            _PREFIX, [n for n, kind in enumerate(kinds) if kind != "full_attention"], _delta(config, model_type, width)
        ),
    ]
    if dense:
        blocks.append(Block(_PREFIX, dense, gated_mlp("mlp", width, config.integer("intermediate_size"))))
    if rule is not None:
        blocks.append(Block(_PREFIX, sparse, moe(config, rule, width)))
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _attention(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """The query projection holds the gate of the output beside the query."""
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    bias = config.boolean("attention_bias", default=False)
    plain = grouped_attention("self_attn", width, heads, config.integer("num_key_value_heads"), head_dim, bias, bias)
    query = linear("self_attn.q_proj", width, 2 * heads * head_dim, bias)
    return (query, *plain[1:], norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim))


def _delta(config: ConfigReader, model_type: str, width: int) -> tuple[Weight, ...]:
    """Qwen3-Next joins in two matrices what Qwen3.5 holds in four: queries, keys, values and gate; beta and decay."""
    value_heads, value_dim = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    values = value_heads * value_dim
    channels = 2 * keys + values
    if model_type == "qwen3_next":
        inputs = {"qkvz": channels + values, "ba": 2 * value_heads}
    else:
        inputs = {"qkv": channels, "z": values, "b": value_heads, "a": value_heads}
    return (
        *(linear(f"linear_attn.in_proj_{name}", width, outputs) for name, outputs in inputs.items()),
        linear("linear_attn.out_proj", values, width),
        other("linear_attn.conv1d", channels * config.integer("linear_conv_kernel_dim")),
        other("linear_attn.dt_bias", value_heads),
        other("linear_attn.A_log", value_heads),
        norm("linear_attn.norm", value_dim),
    )
