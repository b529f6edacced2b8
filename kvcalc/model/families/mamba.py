"""Mamba, Falcon-Mamba and Mamba-2: every layer has a state, and there is no attention."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.common import decoder_body
from kvcalc.model.mixers.recurrent import mamba, mamba2
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.type_tables import defaults_of


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer has the same mixer. The inner width of Mamba is intermediate_size if the config states it.

    Source: MambaMixer and Mamba2Mixer, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    config.refuse("ssm_cfg", "this is a config of the original repository; use the one converted for Transformers")
    state, kernel = config.integer("state_size"), config.integer("conv_kernel")
    hidden_size = config.integer("hidden_size")
    bias, conv_bias = config.boolean("use_bias", default=False), config.boolean("use_conv_bias", default=True)
    if model_type == "mamba2":
        inner = mamba2_inner(config, expanded(config, "expand"), "num_heads", "head_dim")
        heads, groups = config.integer("num_heads"), config.integer("n_groups")
        mixer = mamba2(inner, heads, groups, state, kernel, hidden_size, "mixer", bias=bias, conv_bias=conv_bias)
    else:
        inner = config.optional_integer("intermediate_size") or expanded(config, "expand")
        rank = time_step_rank(config, "time_step_rank")
        mixer = mamba(inner, state, kernel, hidden_size, rank, "mixer", bias=bias, conv_bias=conv_bias)
    num_layers = config.num_layers("num_hidden_layers", "n_layer")

    def body() -> Body:
        return decoder_body(
            config, (), norms=("norm",), last="backbone.norm_f", tied=model_type != "mamba2",
            embedding="backbone.embeddings", prefix="backbone.layers.{}.",
        )  # fmt: skip

    return config.model(model_type, [(mixer,)] * num_layers, body, positions=())


def mamba2_inner(config: ConfigReader, inner: int, heads_key: str, head_dim_key: str) -> int:
    """Return `inner`. Raises ModelError if it is not heads x head_dim.

    If head_dim is "auto" or missing, it is computed from the inner width.
    """
    heads = config.integer(heads_key)
    head_dim = inner // heads if config.is_any(head_dim_key, None, "auto") else config.integer(head_dim_key)
    if heads * head_dim != inner:
        raise ModelError(
            f"{config.name}: {heads_key} {heads} x {head_dim_key} {head_dim} is not the inner width {inner}"
        )
    return inner


def expanded(config: ConfigReader, key: str) -> int:
    """Return the inner width, hidden_size times the factor under `key`, which must be an integer."""
    inner = config.number(key, default=2.0) * config.integer("hidden_size")
    if inner != int(inner):
        raise ModelError(f"{config.name}: {key} x hidden_size is {inner}: must be an integer")
    return int(inner)


def time_step_rank(config: ConfigReader, key: str) -> int:
    """Return the rank of the time-step projection. If it is "auto" or missing: hidden_size / 16, rounded up."""
    if config.is_any(key, None, "auto"):
        return -(-config.integer("hidden_size") // 16)
    return config.integer(key)
