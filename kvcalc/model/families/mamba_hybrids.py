"""Mamba beside attention: Jamba, Bamba, Granite 4, Zamba in layers of their own; Falcon-H1 in the same layer."""

from __future__ import annotations

from kvcalc.model.caches import Cache
from kvcalc.model.families.grouped import GROUPED_KEYS, full_attention, grouped_shape
from kvcalc.model.families.mamba_state import expanded, mamba2_inner, mamba2_state, mamba_state
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset(
    (
        *GROUPED_KEYS,
        *(
            "attn_layer_period attn_layer_offset attn_layer_indices attn_rotary_emb expert_layer_period "
            "expert_layer_offset layer_types layers_block_type mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank "
            "mamba_conv_bias mamba_proj_bias mamba_inner_layernorms mamba_d_ssm mamba_n_heads mamba_d_head "
            "mamba_n_groups mamba_chunk_size mamba_rms_norm mamba_norm_before_gate mamba_use_mlp use_mamba_kernels "
            "projectors_bias ssm_multipliers ssm_in_multiplier ssm_out_multiplier num_experts num_local_experts "
            "num_experts_per_tok shared_intermediate_size position_embedding_type sliding_window normalization_function"
        ).split(),
    )
)

# Source: JambaConfig, BambaConfig, GraniteMoeHybridConfig and FalconH1Config, Transformers 5.23.0.
_MAMBA2: dict[str, object] = {"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_n_heads": 128}
_DEFAULTS: dict[str, dict[str, object]] = {
    "jamba": {
        "num_key_value_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "attn_layer_period": 8,
        "attn_layer_offset": 4,
    },
    "bamba": {**_MAMBA2, "num_key_value_heads": 8},
    "granitemoehybrid": _MAMBA2,
    "falcon_h1": {**_MAMBA2, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
}  # fmt: skip
_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A state where a layer is Mamba's (Mamba-2's but in Jamba), K and V where it is attention's."""
    config = config.with_defaults(_DEFAULTS[model_type])
    config.refuse("sliding_window", "windows of this family are not modelled")
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    full = full_attention(shape)
    width, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    if model_type == "jamba":
        state = mamba_state(expanded(config, "mamba_expand"), width, kernel)
    else:
        inner = config.optional_integer("mamba_d_ssm") if model_type == "falcon_h1" else None
        inner = mamba2_inner(config, inner or expanded(config, "mamba_expand"), "mamba_n_heads", "mamba_d_head")
        state = mamba2_state(inner, config.integer("mamba_n_heads"), config.integer("mamba_n_groups"), width, kernel)
    if model_type == "falcon_h1":
        both: tuple[Cache, ...] = (full, state)
        return config.model(model_type, shape, group_layers([both] * num_layers))
    attends = attention_layers(config, model_type, num_layers)
    layers: list[tuple[Cache, ...]] = [(full,) if attending else (state,) for attending in attends]
    return config.model(model_type, shape, group_layers(layers))


def attention_layers(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    """Which layers attend: every so many (Jamba), those listed by number (Bamba), or by kind (Granite)."""
    if model_type == "jamba":
        period = config.integer("attn_layer_period")
        offset = config.integer("attn_layer_offset", least=0, most=period - 1)
        return [number % period == offset for number in range(num_layers)]
    if model_type == "bamba":
        listed = config.integers("attn_layer_indices", most=num_layers - 1)
        return [number in listed for number in range(num_layers)]
    kinds = config.strings("layer_types", num_layers, (*_NAMES, *_NAMES.values()))
    return [_NAMES.get(kind, kind) == "full_attention" for kind in kinds or ["mamba"] * num_layers]
