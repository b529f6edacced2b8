"""MiMo-V2-Flash: windows in most layers, keys wider than values, and a number of KV heads of its own in the windows."""

from __future__ import annotations

from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim v_head_dim sliding_window "
        "sliding_window_size attention_chunk_size swa_num_attention_heads swa_num_key_value_heads swa_head_dim "
        "swa_v_head_dim hybrid_layer_pattern layer_types mlp_layer_types attention_bias rope_theta swa_rope_theta "
        "rope_scaling rope_parameters partial_rotary_factor moe_layer_freq moe_intermediate_size n_routed_experts "
        "n_shared_experts num_experts_per_tok attention_value_scale add_swa_attention_sink_bias "
        "add_full_attention_sink_bias layernorm_epsilon"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Layers of hybrid_layer_pattern 1 have a window of sliding_window_size earlier tokens and the current one.

    attention_chunk_size repeats the window and makes no chunks. Source: MiMoV2FlashConfig, Transformers 5.23.0, and
    the published config's swa_ keys.
    """
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads", "swa_num_attention_heads")
    head_dim, v_head_dim = config.integer("head_dim", "swa_head_dim"), config.integer("v_head_dim", "swa_v_head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    swa_kv_heads = config.check_groups(num_heads, config.integer("swa_num_key_value_heads"))
    earlier = config.optional_integer("sliding_window_size")
    window = config.integer("sliding_window") if earlier is None else earlier + 1
    full: tuple[Cache, ...] = (FullAttention(num_kv_heads, head_dim, v_head_dim),)
    windowed: tuple[Cache, ...] = (SlidingWindowAttention(window, swa_kv_heads, head_dim, v_head_dim),)
    bias = config.boolean("attention_bias", default=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, v_head_dim, config.integer("hidden_size"), qkv_bias=bias, rope_dim=head_dim,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    layers = group_layers(windowed if slides else full for slides in sliding_layers(config, num_layers))
    return config.model(model_type, attention, layers)


def sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have the window."""
    stated = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if stated is not None:
        return [kind == "sliding_attention" for kind in stated]
    return config.flags("hybrid_layer_pattern", num_layers)
