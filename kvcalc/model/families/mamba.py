"""Mamba, Falcon-Mamba and Mamba-2: a state in every layer and no attention."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.families.grouped import no_attention
from kvcalc.model.families.mamba_state import expanded, mamba2_inner, mamba2_state, mamba_state
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers n_layer hidden_size d_model d_inner state_size conv_kernel expand intermediate_size "
        "use_conv_bias use_bias time_step_rank num_heads head_dim n_groups use_mambapy use_falcon_mambapy chunk_size "
        "ssm_cfg layer_norm_epsilon mixer_rms_eps"
    ).split()
)

# Source: MambaConfig, FalconMambaConfig and Mamba2Config, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "mamba": {"state_size": 16, "conv_kernel": 4},
    "falcon_mamba": {"state_size": 16, "conv_kernel": 4},
    "mamba2": {"state_size": 128, "conv_kernel": 4, "n_groups": 8, "num_heads": 128, "head_dim": 64},
}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The same state in every layer. Mamba's inner width is intermediate_size where that is stated."""
    config = config.with_defaults(_DEFAULTS[model_type])
    config.refuse("ssm_cfg", "a config of the original repository; the converted one states its sizes")
    width, kernel = config.integer("state_size"), config.integer("conv_kernel")
    if model_type == "mamba2":
        inner = mamba2_inner(config, expanded(config, "expand"), "num_heads", "head_dim")
        state: RecurrentState = mamba2_state(
            inner, config.integer("num_heads"), config.integer("n_groups"), width, kernel
        )
    else:
        state = mamba_state(config.optional_integer("intermediate_size") or expanded(config, "expand"), width, kernel)
    num_layers = config.num_layers("num_hidden_layers", "n_layer")
    return config.model(model_type, no_attention(config), uniform_layers(num_layers, state), positions=())
