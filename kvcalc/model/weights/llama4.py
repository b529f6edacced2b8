"""Llama 4: experts with a shared one, in every layer or in every second."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    around,
    experts,
    gated_mlp,
    grouped_attention,
    norm,
    remaining,
    router,
)

# Source: Llama4TextConfig, Transformers 5.23.0.
_DEFAULTS = {
    "vocab_size": 202048, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
}  # fmt: skip
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Query and key norms have no weights. Source: Llama4TextDecoderLayer, Transformers 5.23.0."""
    config = config.with_defaults(_DEFAULTS)
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    bias = config.boolean("attention_bias", default=False)
    kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    common = (
        *grouped_attention("self_attn", width, num_heads, kv_heads, config.head_dim(width, num_heads), bias, bias),
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
    )
    inner, count = config.integer("intermediate_size"), config.integer("num_local_experts")
    moe = (
        router("feed_forward.router", width, count),
        *experts(
            gated_mlp("feed_forward.experts.0", width, inner), count, config.integer("num_experts_per_tok", most=count)
        ),
        *gated_mlp("feed_forward.shared_expert", width, inner),
    )
    sparse = _sparse_layers(config, num_layers)
    dense = remaining(num_layers, sparse)
    blocks = [Block(_PREFIX, range(num_layers), common), Block(_PREFIX, sparse, moe)]
    if dense:
        blocks.append(Block(_PREFIX, dense, gated_mlp("feed_forward", width, config.integer("intermediate_size_mlp"))))
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[int]:
    stated = config.config.get("moe_layers")
    if stated is None:
        step = config.integer("interleave_moe_layer_step")
        return [*range(step - 1, num_layers, step)]
    if not isinstance(stated, list) or not all(type(n) is int and 0 <= n < num_layers for n in stated):
        raise ModelError(f"{config.name}: moe_layers must list layers from 0 to {num_layers - 1}")
    return sorted(set(stated))
