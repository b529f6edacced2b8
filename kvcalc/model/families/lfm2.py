"""Liquid's LFM2 and LFM3: short convolutions, with attention in some layers (LFM3: some of it in a window)."""

from __future__ import annotations

from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.families.grouped import GROUPED_KEYS, full_attention, grouped_shape, sliding_window
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset(
    (
        *GROUPED_KEYS,
        *(
            "layer_types full_attn_idxs conv_L_cache conv_bias conv_dim conv_dim_out conv_use_xavier_init block_dim "
            "block_ff_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim num_experts "
            "num_experts_per_tok num_dense_layers moe_intermediate_size use_expert_bias sliding_window tie_embedding "
            "num_heads"
        ).split(),
    )
)

# Source: Lfm2Config, Lfm2MoeConfig and Lfm3Config, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "lfm2_moe": {"num_key_value_heads": 8, "conv_L_cache": 3},
    "lfm3": {"num_key_value_heads": 4, "conv_L_cache": 7, "head_dim": 128, "sliding_window": 256},
}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A convolution over the hidden size keeps its last inputs and no state. Source: Lfm2ShortConv, Transformers."""
    config = config.with_defaults(_DEFAULTS[model_type])
    if model_type != "lfm3":
        config.refuse("sliding_window", "windows of this family are not modelled")
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    hidden_size = config.integer("hidden_size")
    for key in ("conv_dim", "conv_dim_out"):
        if config.optional_integer(key) not in (None, hidden_size):
            raise config.error(f"{key} is not hidden_size {hidden_size}: not modelled")
    kept: dict[str, tuple[Cache, ...]] = {
        "conv": (RecurrentState(hidden_size, config.integer("conv_L_cache"), 0),),
        "full_attention": (full_attention(shape),),
    }
    if model_type == "lfm3":
        kept["sliding_attention"] = (sliding_window(shape, config.integer("sliding_window")),)
    kinds = layer_kinds(config, model_type, num_layers)
    return config.model(model_type, shape, group_layers(kept[kind] for kind in kinds))


def layer_kinds(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """The config's own list, else the family's pattern."""
    windows = ("sliding_attention",) if model_type == "lfm3" else ()
    kinds = config.strings("layer_types", num_layers, ("conv", "full_attention", *windows))
    return _pattern(config, model_type, num_layers) if kinds is None else kinds


def _pattern(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """Without layer_types: LFM2 lists the layers that attend, all where it does not; LFM3 has a pattern of four."""
    if model_type == "lfm3":
        by_rest = {2: "full_attention", 0: "sliding_attention"}
        return ["conv" if n == 0 else by_rest.get(n % 4, "conv") for n in range(num_layers)]
    if model_type == "lfm2_moe":
        raise config.error("layer_types is missing")
    if config.config.get("full_attn_idxs") is None:
        return ["full_attention"] * num_layers
    listed = config.integers("full_attn_idxs", most=num_layers - 1)
    return ["full_attention" if number in listed else "conv" for number in range(num_layers)]
