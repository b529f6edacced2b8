"""Falcon: multi-query in the first architecture (7B), grouped in the new one (40B, 180B)."""

from __future__ import annotations

from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers n_layer num_attention_heads n_head hidden_size n_embed num_kv_heads n_head_kv "
        "multi_query new_decoder_architecture parallel_attn alibi bias ffn_hidden_size rope_theta rope_scaling "
        "rope_parameters layer_norm_epsilon num_ln_in_parallel_attn"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """What attention must keep; Transformers repeats K and V of the new architecture over all heads (its engine file).

    `multi_query` is true where absent and counts in the first architecture alone, num_kv_heads in the new one alone.
    Source: FalconConfig and FalconAttention, Transformers 5.23.0.
    """
    num_layers = config.num_layers("num_hidden_layers", "n_layer")
    num_heads = config.integer("num_attention_heads", "n_head")
    hidden_size = config.integer("hidden_size", "n_embed")
    head_dim = config.head_dim(hidden_size, num_heads)
    if config.boolean("new_decoder_architecture", default=False):
        num_kv_heads = config.optional_integer("num_kv_heads", "n_head_kv") or num_heads
    else:
        num_kv_heads = 1 if config.boolean("multi_query", default=True) else num_heads
    bias = config.boolean("bias", default=False)
    alibi = config.boolean("alibi", default=False)
    attention = AttentionShape(
        num_heads, config.check_groups(num_heads, num_kv_heads), head_dim, head_dim, hidden_size,
        qkv_bias=bias, output_bias=bias, rope_dim=0 if alibi else head_dim,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    return config.model(
        model_type, attention, uniform_layers(num_layers, FullAttention(num_kv_heads, head_dim, head_dim))
    )
