"""Kimi Linear: Kimi delta attention, with latent attention in some layers, and experts."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.families.kimi_linear import full_layers
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.latent import latent_attention
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    gated_mlp,
    linear,
    norm,
    other,
    remaining,
)

_EXPERTS = Experts("num_local_experts", shared=True)
_PREFIX = "model.layers.{}."
# Kimi K3's own: matrices which Transformers 5.23.0 does not build.
_NOT_BUILT = ("routed_expert_hidden_size", "mla_use_output_gate", "attn_res_block_size", "latent_moe_use_norm")


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: KimiLinearDecoderLayer, KimiLinearConfig, Transformers 5.23.0."""
    nested = config.config.get("linear_attn_config")
    nested = nested if isinstance(nested, Mapping) else {}
    for key in _NOT_BUILT:
        config.refuse(key, "the weights this adds are not counted")
    if nested.get("use_full_rank_gate"):
        raise config.error("linear_attn_config.use_full_rank_gate: the weights this adds are not counted")
    if config.config.get("moe_layer_freq") not in (None, 1):
        raise config.error("moe_layer_freq: only 1 is known")
    defaults = {
        "vocab_size": 163840, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_local_experts": 256,
        "num_experts_per_tok": config.optional_integer("num_experts_per_tok", "num_experts_per_token") or 8,
        "n_shared_experts": config.optional_integer("n_shared_experts", "num_shared_experts") or 1,
    }  # fmt: skip
    config = with_defaults(config, defaults)
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    attends = full_layers(config, nested, num_layers)
    sparse = _sparse_layers(config, num_layers)
    latent, delta = latent_attention(config, width), _delta_attention(config, width)
    blocks = [
        Block(_PREFIX, range(num_layers), (norm("input_layernorm", width), norm("post_attention_layernorm", width))),
        Block(_PREFIX, [n for n in range(num_layers) if attends[n]], latent),
        Block(_PREFIX, [n for n in range(num_layers) if not attends[n]], delta),
        Block(_PREFIX, remaining(num_layers, sparse), gated_mlp("mlp", width, config.integer("intermediate_size"))),
        Block(_PREFIX, sparse, moe(config, _EXPERTS, width)),
    ]
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _delta_attention(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """Source: KimiLinearDeltaAttention, Transformers 5.23.0."""
    heads, head_dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    inner = heads * head_dim
    return (
        *(linear(f"self_attn.{name}_proj", width, inner) for name in "qkv"),
        linear("self_attn.o_proj", inner, width),
        linear("self_attn.b_proj", width, heads),
        *(linear(f"self_attn.{name}_a_proj", width, head_dim) for name in "fg"),
        *(linear(f"self_attn.{name}_b_proj", head_dim, inner) for name in "fg"),
        other("self_attn.conv1d", 3 * inner * config.integer("linear_conv_kernel_dim")),
        other("self_attn.dt_bias", inner),
        other("self_attn.A_log", heads),
        norm("self_attn.o_norm", head_dim),
    )


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[int]:
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    if kinds is not None:
        return [number for number, kind in enumerate(kinds) if kind == "sparse"]
    first = config.optional_integer("first_k_dense_replace", least=0)
    return [*range(min(1 if first is None else first, num_layers), num_layers)]
