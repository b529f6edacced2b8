"""Zamba and Zamba2: Mamba in every layer.

Some layers first call a shared attention block, whose input is twice as wide as the model.
"""

from __future__ import annotations

from kvcalc.model.families.common import grouped_shape
from kvcalc.model.families.mamba import expanded, mamba2_inner, time_step_rank
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import mamba, mamba2
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset(
    (
        "num_key_value_heads head_dim attention_head_dim attn_layer_period attn_layer_offset layer_types "
        "hybrid_layer_ids n_mamba_heads mamba_headdim mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank "
        "mamba_ngroups mamba_conv_bias mamba_proj_bias use_mamba_kernels use_conv_bias kv_channels "
        "hidden_mamba_act"
    ).split()
)

# Source: ZambaConfig and Zamba2Config, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "zamba": {
        "num_key_value_heads": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "n_mamba_heads": 2, "attn_layer_period": 6,
        "attn_layer_offset": 4,
    },
    "zamba2": {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_ngroups": 1, "n_mamba_heads": 8},
}  # fmt: skip
# The default order of Zamba2's 54 layers if the config does not list them.
_ZAMBA2 = "M" + "MMMMMH" * 7 + "MMMMH" + "MMMH" + "MM"
_KINDS = ("mamba", "linear_attention", "hybrid")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A hybrid layer keeps K and V of its call of the shared block and a Mamba state. Other layers keep only the state.

    Every call of the shared block has its own cache. Source: ZambaHybridLayer and Zamba2HybridLayer, Transformers
    5.23.0.
    """
    config = config.with_defaults(_DEFAULTS[model_type])
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    width = config.optional_integer("attention_head_dim") or 2 * config.integer("hidden_size") // num_heads
    shape = grouped_shape(config.without("head_dim"), head_dim=width, rotary=model_type == "zamba2")
    inner, hidden_size = expanded(config, "mamba_expand"), config.integer("hidden_size")
    state_size, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    if model_type == "zamba":
        rank = time_step_rank(config, "mamba_dt_rank")
        mixer = mamba(inner, state_size, kernel, hidden_size, rank, "mamba")
    else:
        inner = mamba2_inner(config, inner, "n_mamba_heads", "mamba_headdim")
        heads, groups = config.integer("n_mamba_heads"), config.integer("mamba_ngroups")
        mixer = mamba2(inner, heads, groups, state_size, kernel, hidden_size, "mamba")
    state_only: tuple[Mixer, ...] = (mixer,)
    both: tuple[Mixer, ...] = (Attention(shape), mixer)
    hybrid = _hybrid_layers(config, model_type, num_layers)
    return config.model(model_type, [both if is_hybrid else state_only for is_hybrid in hybrid], attention=shape)


def _hybrid_layers(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    kinds = config.strings("layers_block_type", num_layers, _KINDS)
    if kinds is None:
        kinds = config.strings("layer_types", num_layers, _KINDS)
    if kinds is not None:
        return [kind == "hybrid" for kind in kinds]
    if model_type == "zamba2":
        if num_layers != len(_ZAMBA2):
            raise config.error("layers_block_type is missing: there is a default only for Zamba2-2.7B with 54 layers")
        return [letter == "H" for letter in _ZAMBA2]
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    return [False, False, True, *(number % period == offset for number in range(num_layers - 3))][:num_layers]
