"""MiMo-V2-Flash: other numbers of KV heads and sinks in the layers with a window, experts after the dense layers."""

from __future__ import annotations

from kvcalc.model.families.mimo import sliding_layers
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import Block, ModelWeights, Weight, around, gated_mlp, grouped_attention, norm, other

# Source: MiMoV2FlashConfig, Transformers 5.23.0.
_DEFAULTS = {
    "vocab_size": 152576, "intermediate_size": 16384, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}  # fmt: skip
_EXPERTS = Experts("n_routed_experts")
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: MiMoV2FlashAttention, Transformers 5.23.0. The output projection never has a bias."""
    config = with_defaults(config, _DEFAULTS)
    config.refuse("n_shared_experts", "shared experts of this family are not modelled")
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    slides = sliding_layers(config, num_layers)
    sparse = _sparse_layers(config, num_layers)
    windowed = [n for n in range(num_layers) if slides[n]]
    full = [n for n in range(num_layers) if not slides[n]]
    dense = [n for n in range(num_layers) if not sparse[n]]
    heads = config.integer("num_attention_heads")
    blocks = [
        Block(_PREFIX, range(num_layers), (norm("input_layernorm", width), norm("post_attention_layernorm", width))),
        Block(_PREFIX, full, _attention(config, width, heads, "num_key_value_heads")),
        Block(
            _PREFIX,
            windowed,
            (*_attention(config, width, heads, "swa_num_key_value_heads"), other("self_attn.sinks", heads)),
        ),
        Block(_PREFIX, dense, gated_mlp("mlp", width, config.integer("intermediate_size"))),
        Block(_PREFIX, [n for n in range(num_layers) if sparse[n]], moe(config, _EXPERTS, width)),
    ]
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _attention(config: ConfigReader, width: int, heads: int, kv_heads: str) -> tuple[Weight, ...]:
    return grouped_attention(
        "self_attn", width, heads, config.integer(kv_heads), config.integer("head_dim"),
        config.boolean("attention_bias", default=False), v_head_dim=config.integer("v_head_dim"),
    )  # fmt: skip


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """moe_layer_freq says it in the published config, mlp_layer_types in Transformers' own; else all but the first."""
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if config.config.get("moe_layer_freq") is not None:
        return config.flags("moe_layer_freq", num_layers)
    return [number > 0 for number in range(num_layers)]
