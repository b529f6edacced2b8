"""MiniMax-Text-01 and M1: lightning attention with a gated output, full attention in some layers, experts in all."""

from __future__ import annotations

from kvcalc.model.families.minimax import layer_types
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import Block, ModelWeights, around, grouped_attention, linear, norm

# Source: MiniMaxConfig, Transformers 5.23.0.
_DEFAULTS = {"vocab_size": 32000, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
_EXPERTS = Experts(inner="intermediate_size", prefix="block_sparse_moe", names=("w1", "w3", "w2"))
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: MiniMaxDecoderLayer and MiniMaxLightningAttention, Transformers 5.23.0."""
    if config.optional_integer("shared_intermediate_size", least=0):
        raise config.error("shared_intermediate_size: a shared expert of this family is not counted")
    config = with_defaults(config, _DEFAULTS)
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers, heads = config.num_layers("num_hidden_layers"), config.integer("num_attention_heads")
    head_dim, kv_heads = config.head_dim(width, heads), config.optional_integer("num_key_value_heads") or heads
    inner = heads * head_dim
    lightning = (
        linear("self_attn.qkv_proj", width, 3 * inner),
        linear("self_attn.output_gate", width, inner),
        linear("self_attn.out_proj", inner, width),
        norm("self_attn.norm", inner),
    )
    common = (
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
        *moe(config, _EXPERTS, width),
    )
    full = grouped_attention("self_attn", width, heads, kv_heads, head_dim)
    kinds = layer_types(config, num_layers)
    blocks = (
        Block(_PREFIX, range(num_layers), common),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind == "full_attention"], full),
        Block(_PREFIX, [n for n, kind in enumerate(kinds) if kind != "full_attention"], lightning),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))
