"""Nemotron-H and Nemotron 3: layers of one mixer each, Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from kvcalc.model.families.nemotron_h import layer_kinds
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import with_defaults
from kvcalc.model.weights.mamba import mamba2_mixer
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    experts,
    grouped_attention,
    norm,
    plain_mlp,
    router,
)

# Source: NemotronHConfig, Transformers 5.23.0.
_DEFAULTS = {
    "vocab_size": 131072, "intermediate_size": 21504, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "mamba_num_heads": 128,
    "mamba_head_dim": 64,
}  # fmt: skip


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: NemotronHMamba2Mixer, NemotronHMoE, NemotronHAttention, Transformers 5.23.0."""
    config = with_defaults(config, _DEFAULTS)
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    kinds = layer_kinds(config)
    mixers = {"mamba": _mamba, "attention": _attention, "mlp": _mlp, "moe": _moe}
    blocks = [Block("backbone.layers.{}.", range(len(kinds)), (norm("norm", width),))]
    for kind, mixer in mixers.items():
        layers = [n for n, found in enumerate(kinds) if found == kind]
        if layers:
            blocks.append(Block("backbone.layers.{}.", layers, mixer(config, width)))
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("backbone.norm_f", width), embedding="backbone.embeddings")
    return ModelWeights(embedding, tied, (*blocks, ends))


def _mamba(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    bias = config.boolean("use_bias", default=False)
    conv_bias = config.boolean("use_conv_bias", default=True)
    heads = config.integer("mamba_num_heads")
    return mamba2_mixer(
        "mixer", width, heads, heads * config.integer("mamba_head_dim"),
        config.integer("n_groups") * config.integer("ssm_state_size"), config.integer("conv_kernel"), bias, conv_bias,
    )  # fmt: skip


def _attention(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    heads = config.integer("num_attention_heads")
    return grouped_attention(
        "mixer", width, heads, config.optional_integer("num_key_value_heads") or heads,
        config.integer("head_dim", "attention_head_dim"),
    )  # fmt: skip


def _mlp(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    bias = config.boolean("mlp_bias", default=False)
    return plain_mlp("mixer.up_proj", "mixer.down_proj", width, config.integer("intermediate_size"), bias)


def _moe(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """Experts without a gate; Nemotron 3 Super's and Ultra's work in a narrower width (moe_latent_size)."""
    count, inner = config.integer("n_routed_experts", "num_local_experts"), config.integer("moe_intermediate_size")
    bias = config.boolean("mlp_bias", default=False)
    latent = config.optional_integer("moe_latent_size")
    matrices = plain_mlp("mixer.experts.0.up_proj", "mixer.experts.0.down_proj", latent or width, inner)
    found = (
        router("mixer.gate", width, count),
        *experts(matrices, count, config.integer("num_experts_per_tok", most=count)),
        *plain_mlp(
            "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj", width,
            config.integer("moe_shared_expert_intermediate_size"), bias,
        ),
    )  # fmt: skip
    if latent is not None:
        found += plain_mlp("mixer.fc1_latent_proj", "mixer.fc2_latent_proj", width, latent, bias)
    return found
