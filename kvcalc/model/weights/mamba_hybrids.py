"""Mamba beside attention: Jamba, Bamba and Granite 4 in layers of their own, Falcon-H1 in the same layer."""

from __future__ import annotations

from kvcalc.model.families.mamba_hybrids import attention_layers
from kvcalc.model.families.mamba_state import expanded
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.mamba import mamba2_mixer, mamba_mixer, time_step_rank
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    gated_mlp,
    grouped_attention,
    linear,
    norm,
    remaining,
)

# Source: JambaConfig, BambaConfig, GraniteMoeHybridConfig and FalconH1Config, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "jamba": {
        "vocab_size": 65536, "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "bamba": {"vocab_size": 128000, "intermediate_size": 14336},
    "granitemoehybrid": {
        "vocab_size": 32000, "intermediate_size": 11008, "num_local_experts": 8, "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    "falcon_h1": {"vocab_size": 128000, "intermediate_size": 14336},
}  # fmt: skip
_EXPERTS = {
    "jamba": Experts("num_experts", "intermediate_size", prefix="feed_forward", router="router"),
    "granitemoehybrid": Experts(inner="intermediate_size", prefix="block_sparse_moe", router="router"),
}
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Mixers by the kind of layer, and an MLP, experts or both in every layer.

    Source: JambaAttentionDecoderLayer, BambaDecoderLayer, GraniteMoeHybridDecoderLayer and FalconH1DecoderLayer,
    Transformers 5.23.0.
    """
    config = with_defaults(config, _DEFAULTS[model_type])
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    is_granite = model_type == "granitemoehybrid"
    names = ("input_layernorm", "post_attention_layernorm" if is_granite else "pre_ff_layernorm")
    blocks = [Block(_PREFIX, range(num_layers), tuple(norm(name, width) for name in names))]
    if model_type == "falcon_h1":
        attending = mixing = [*range(num_layers)]
    else:
        flags = attention_layers(config, model_type, num_layers)
        attending = [number for number in range(num_layers) if flags[number]]
        mixing = remaining(num_layers, attending)
    blocks.append(Block(_PREFIX, attending, _attention(config, model_type, width)))
    blocks.append(Block(_PREFIX, mixing, _mixer(config, model_type, width)))
    blocks += _feed_forward(config, model_type, width, num_layers)
    last = norm("model.norm" if is_granite else "model.final_layernorm", width)
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, last)
    return ModelWeights(embedding, tied, (*blocks, ends))


def _attention(config: ConfigReader, model_type: str, width: int) -> tuple[Weight, ...]:
    heads = config.integer("num_attention_heads")
    bias = model_type != "jamba" and config.boolean("attention_bias", default=False)
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    return grouped_attention("self_attn", width, heads, kv_heads, config.head_dim(width, heads), bias, bias)


def _mixer(config: ConfigReader, model_type: str, width: int) -> tuple[Weight, ...]:
    bias = config.boolean("mamba_proj_bias", default=False)
    conv_bias = config.boolean("mamba_conv_bias", default=True)
    state, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    if model_type == "jamba":
        inner, rank = expanded(config, "mamba_expand"), time_step_rank(config, "mamba_dt_rank")
        norms = {"dt": rank, "b": state, "c": state}
        return (
            *mamba_mixer("mamba", width, inner, state, rank, kernel, bias, conv_bias),
            *(norm(f"mamba.{name}_layernorm", elements) for name, elements in norms.items()),
        )
    heads, groups = config.integer("mamba_n_heads"), config.integer("mamba_n_groups") * state
    if model_type != "falcon_h1":
        return mamba2_mixer("mamba", width, heads, expanded(config, "mamba_expand"), groups, kernel, bias, conv_bias)
    inner = config.optional_integer("mamba_d_ssm") or expanded(config, "mamba_expand")
    return mamba2_mixer(
        "mamba", width, heads, inner, groups, kernel, bias, conv_bias,
        config.boolean("projectors_bias", default=False), config.boolean("mamba_rms_norm", default=False),
    )  # fmt: skip


def _feed_forward(config: ConfigReader, model_type: str, width: int, num_layers: int) -> list[Block]:
    inner = config.integer("intermediate_size")
    if model_type == "granitemoehybrid":
        # The shared MLP stands in every layer, experts beside it where there are any.
        shared = config.integer("shared_intermediate_size")
        layer: tuple[Weight, ...] = (
            linear("shared_mlp.input_linear", width, 2 * shared),
            linear("shared_mlp.output_linear", shared, width),
        )
        if config.integer("num_local_experts", "num_experts", least=0):
            layer += moe(config, _EXPERTS[model_type], width)
        return [Block(_PREFIX, range(num_layers), layer)]
    bias = model_type != "jamba" and config.boolean("mlp_bias", default=False)
    dense = gated_mlp("feed_forward", width, inner, bias)
    if model_type != "jamba":
        return [Block(_PREFIX, range(num_layers), dense)]
    period = config.integer("expert_layer_period")
    offset = config.integer("expert_layer_offset", least=0, most=period - 1)
    has_experts = config.integer("num_experts", "num_local_experts") > 1
    sparse = range(offset, num_layers, period) if has_experts else range(0)
    found = [Block(_PREFIX, remaining(num_layers, sparse), dense)]
    return [*found, Block(_PREFIX, sparse, moe(config, _EXPERTS[model_type], width))] if has_experts else found
