"""GPT-2: multi-head attention with biases and learned positions, under its own key names."""

from __future__ import annotations

from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "n_layer num_hidden_layers n_head num_attention_heads n_embd hidden_size n_positions n_ctx n_inner "
        "add_cross_attention activation_function layer_norm_epsilon"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every head in every layer. Source of the aliases: GPT2Config, Transformers 5.23.0."""
    config.refuse("add_cross_attention", "cross-attention caches of GPT-2 decoders are not modelled")
    num_layers = config.num_layers("n_layer", "num_hidden_layers")
    num_heads = config.integer("n_head", "num_attention_heads")
    hidden_size = config.integer("n_embd", "hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    attention = AttentionShape(num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=True, output_bias=True)
    layers = uniform_layers(num_layers, FullAttention(num_heads, head_dim, head_dim))
    return config.model(model_type, attention, layers, positions=("n_positions", "max_position_embeddings"))
