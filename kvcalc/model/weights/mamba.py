"""Mamba, Falcon-Mamba and Mamba-2 alone, and the mixers other models have of them."""

from __future__ import annotations

from kvcalc.model.families.mamba_state import expanded
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import Block, ModelWeights, Weight, around, linear, norm, other

# Source: MambaConfig, FalconMambaConfig and Mamba2Config, Transformers 5.23.0.
_VOCAB = {"mamba": 50280, "falcon_mamba": 50280, "mamba2": 32768}


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """One norm and one mixer a layer. Source: MambaMixer and Mamba2Mixer, Transformers 5.23.0."""
    config = config.with_defaults({"vocab_size": _VOCAB[model_type]})
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    bias, conv_bias = config.boolean("use_bias", default=False), config.boolean("use_conv_bias", default=True)
    kernel, state = config.integer("conv_kernel"), config.integer("state_size")
    inner = expanded(config, "expand")
    if model_type == "mamba2":
        heads, groups = config.integer("num_heads"), config.integer("n_groups") * state
        mixer = mamba2_mixer("mixer", width, heads, inner, groups, kernel, bias, conv_bias)
    else:
        inner = config.optional_integer("intermediate_size") or inner
        mixer = mamba_mixer(
            "mixer", width, inner, state, time_step_rank(config, "time_step_rank"), kernel, bias, conv_bias
        )
    tied = config.boolean("tie_word_embeddings", default=model_type != "mamba2")
    embedding, ends = around(vocab, width, tied, norm("backbone.norm_f", width), embedding="backbone.embeddings")
    layers = range(config.num_layers("num_hidden_layers", "n_layer"))
    return ModelWeights(embedding, tied, (Block("backbone.layers.{}.", layers, (norm("norm", width), *mixer)), ends))


def time_step_rank(config: ConfigReader, key: str) -> int:
    """The rank of the time step's projection; "auto" or none: a sixteenth of the width, rounded up."""
    if config.config.get(key) in (None, "auto"):
        return -(-config.integer("hidden_size") // 16)
    return config.integer(key)


def mamba_mixer(
    prefix: str, width: int, inner: int, state: int, rank: int, kernel: int, bias: bool, conv_bias: bool
) -> tuple[Weight, ...]:
    """A Mamba mixer with a state of `state` for each of `inner` channels, its time steps through `rank`."""
    return (
        linear(f"{prefix}.in_proj", width, 2 * inner, bias),
        linear(f"{prefix}.x_proj", inner, rank + 2 * state),
        linear(f"{prefix}.dt_proj", rank, inner, bias=True),
        linear(f"{prefix}.out_proj", inner, width, bias),
        other(f"{prefix}.conv1d", inner * (kernel + conv_bias)),
        other(f"{prefix}.A_log", inner * state),
        other(f"{prefix}.D", inner),
    )


def mamba2_mixer(
    prefix: str,
    width: int,
    heads: int,
    inner: int,
    groups: int,
    kernel: int,
    bias: bool,
    conv_bias: bool,
    output_bias: bool | None = None,
    has_norm: bool = True,
) -> tuple[Weight, ...]:
    """A Mamba-2 mixer. `inner`: heads times their width; `groups`: the number of groups times the state's width."""
    channels = inner + 2 * groups
    found = (
        linear(f"{prefix}.in_proj", width, inner + channels + heads, bias),
        linear(f"{prefix}.out_proj", inner, width, bias if output_bias is None else output_bias),
        other(f"{prefix}.conv1d", channels * (kernel + conv_bias)),
        other(f"{prefix}.dt_bias", heads),
        other(f"{prefix}.A_log", heads),
        other(f"{prefix}.D", heads),
    )
    return (*found, norm(f"{prefix}.norm", inner)) if has_norm else found
