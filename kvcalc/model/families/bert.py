"""BERT: multi-head attention with biases and learned positions; an encoder, unless the config says is_decoder."""

from __future__ import annotations

from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads hidden_size is_decoder add_cross_attention type_vocab_size "
        "position_embedding_type layer_norm_eps"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The formula's cache of every layer; `is_encoder` says that no engine keeps it after the forward pass."""
    config.refuse("add_cross_attention", "cross-attention caches of BERT decoders are not modelled")
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    attention = AttentionShape(num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=True, output_bias=True)
    layers = uniform_layers(num_layers, FullAttention(num_heads, head_dim, head_dim))
    return config.model(model_type, attention, layers, is_encoder=not config.boolean("is_decoder", default=False))
