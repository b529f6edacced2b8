"""Llama 3.2 Vision's language model: a LLaMA with layers of gated cross-attention."""

from __future__ import annotations

from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    around,
    gated_mlp,
    grouped_attention,
    norm,
    other,
    remaining,
)

# Source: MllamaTextConfig, Transformers 5.23.0.
_DEFAULTS = {"vocab_size": 128256, "intermediate_size": 14336}
_PREFIX = "model.layers.{}."
# The embedding has rows for the image tokens which the head has not.
_MORE_ROWS = 8


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: MllamaSelfAttentionDecoderLayer, MllamaCrossAttentionDecoderLayer, Transformers 5.23.0."""
    config = config.with_defaults(_DEFAULTS)
    config.refuse("tie_word_embeddings", "the embedding has more rows than the head: not counted")
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers, heads = config.num_layers("num_hidden_layers"), config.integer("num_attention_heads")
    kv_heads, head_dim = config.optional_integer("num_key_value_heads") or heads, config.head_dim(width, heads)
    crossing = [n for n in config.integers("cross_attention_layers", most=MAX_LAYERS) if n < num_layers]
    common = (
        *gated_mlp("mlp", width, config.integer("intermediate_size")),
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
    )
    cross = (
        *grouped_attention("cross_attn", width, heads, kv_heads, head_dim),
        norm("cross_attn.q_norm", head_dim),
        norm("cross_attn.k_norm", head_dim),
        other("cross_attn_attn_gate", 1),
        other("cross_attn_mlp_gate", 1),
    )
    blocks = (
        Block(_PREFIX, range(num_layers), common),
        Block(_PREFIX, sorted(set(crossing)), cross),
        Block(
            _PREFIX,
            remaining(num_layers, crossing),
            grouped_attention("self_attn", width, heads, kv_heads, head_dim),
        ),
    )
    embedding, ends = around(vocab, width, False, norm("model.norm", width))
    return ModelWeights(embedding._replace(rows=vocab + _MORE_ROWS), False, (*blocks, ends))
