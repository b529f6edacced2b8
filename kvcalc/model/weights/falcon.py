"""Falcon: one matrix for queries, keys and values, and one or two norms a layer."""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import Block, ModelWeights, around, linear, norm, plain_mlp


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: FalconAttention, FalconMLP and FalconDecoderLayer, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": 65024})
    width, vocab = config.integer("hidden_size", "n_embed"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers", "n_layer")
    heads = config.integer("num_attention_heads", "n_head")
    head_dim = config.head_dim(width, heads)
    is_new = config.boolean("new_decoder_architecture", default=False)
    if is_new:
        kv_heads = config.optional_integer("num_kv_heads", "n_head_kv") or heads
    else:
        kv_heads = 1 if config.boolean("multi_query", default=True) else heads
    bias = config.boolean("bias", default=False)
    inner = config.optional_integer("ffn_hidden_size") or 4 * width
    layer = (
        linear("self_attention.query_key_value", width, (heads + 2 * kv_heads) * head_dim, bias),
        linear("self_attention.dense", width, width, bias),
        *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", width, inner, bias),
        *(norm(name, width, bias=True) for name in _norms(config, is_new)),
    )
    tied = config.boolean("tie_word_embeddings", default=True)
    outer = norm("transformer.ln_f", width, bias=True)
    embedding, ends = around(vocab, width, tied, outer, embedding="transformer.word_embeddings")
    return ModelWeights(embedding, tied, (Block("transformer.h.{}.", range(num_layers), layer), ends))


def _norms(config: ConfigReader, is_new: bool) -> tuple[str, ...]:
    if not config.boolean("parallel_attn", default=True):
        return ("input_layernorm", "post_attention_layernorm")
    count = config.optional_integer("num_ln_in_parallel_attn") or (2 if is_new else 1)
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)
