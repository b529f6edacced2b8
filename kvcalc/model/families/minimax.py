"""MiniMax-Text-01 and M1: lightning attention, with full attention in some layers."""

from __future__ import annotations

from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.families.grouped import GROUPED_KEYS, full_attention, grouped_shape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset(
    (
        *GROUPED_KEYS,
        *(
            "layer_types block_size sliding_window num_local_experts num_experts_per_tok full_attn_alpha_factor "
            "full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor rotary_dim shared_intermediate_size"
        ).split(),
    )
)

_DEFAULTS = {"num_key_value_heads": 8}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Lightning attention keeps head_dim x head_dim a head, in the model's own dtype, and has no convolution.

    Without layer_types full attention and lightning attention take turns. Source: MiniMaxConfig and
    MiniMaxLightningAttention, Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS)
    config.refuse("sliding_window", "windows of this family are not modelled")
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    elements = shape.num_heads * shape.qk_head_dim * shape.qk_head_dim
    kept: dict[str, tuple[Cache, ...]] = {
        "full_attention": (full_attention(shape),),
        "linear_attention": (RecurrentState(0, 1, elements, state_dtype=None, num_heads=shape.num_heads),),
    }
    return config.model(model_type, shape, group_layers(kept[kind] for kind in layer_types(config, num_layers)))


def layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """The config's own list, else full attention and lightning attention in turn."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return kinds
    return ["linear_attention" if number % 2 else "full_attention" for number in range(num_layers)]
