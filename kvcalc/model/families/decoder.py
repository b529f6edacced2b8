"""Decoders with K and V in every layer: plain, in a window throughout, or in a window in some layers.

What differs between them stands in `decoder_rules`; this is the one way they are read.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.families.decoder_rules import RULES, Rule
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads hidden_size n_embed head_dim "
        "v_head_dim sliding_window sliding_window_pattern _sliding_window_pattern sliding_window_size "
        "use_sliding_window max_window_layers layer_types attention_bias use_bidirectional_attention mlp_bias "
        "position_embedding_type rope_theta rope_scaling rope_parameters rms_norm_eps rope_local_base_freq "
        "use_qk_norm lm_head_bias "
        "query_pre_attn_scalar moe_intermediate_size num_experts num_local_experts num_experts_per_tok "
        "decoder_sparse_step mlp_only_layers norm_topk_prob shared_expert_intermediate_size first_k_dense_replace "
        "n_routed_experts n_shared_experts partial_rotary_factor"
    ).split()
)

WINDOW_KEYS = ("sliding_window", "sliding_window_size")
LAYER_TYPES = ("full_attention", "sliding_attention")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of num_key_value_heads heads in every layer, of all tokens or of the window's."""
    rule = RULES[model_type]
    config = config.with_defaults(rule.defaults)
    for key, why in rule.refused.items():
        config.refuse(key, why)
    _refuse_foreign_keys(config, rule, model_type)
    num_layers = config.num_layers("num_hidden_layers", "n_layer")
    num_heads = config.integer("num_attention_heads", "n_head")
    hidden_size = config.optional_integer("hidden_size", "n_embed")
    head_dim = config.head_dim(hidden_size, num_heads)
    v_head_dim = config.optional_integer("v_head_dim") or head_dim
    num_kv_heads = config.check_groups(num_heads, config.optional_integer("num_key_value_heads") or num_heads)
    full: tuple[Cache, ...] = (FullAttention(num_kv_heads, head_dim, v_head_dim),)
    sliding = [kind == "sliding_attention" for kind in layer_types(config, rule, num_layers)]
    windowed: tuple[Cache, ...] = ()
    if any(sliding):
        windowed = (SlidingWindowAttention(config.integer(*WINDOW_KEYS), num_kv_heads, head_dim, v_head_dim),)
    bias = config.boolean("attention_bias", default=False)
    # Rotary positions, but for models known from a paper which says otherwise.
    rotary = rule.rotary and config.config.get("position_embedding_type") != "absolute"
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, v_head_dim, hidden_size, qkv_bias=bias or rule.qkv_bias, output_bias=bias,
        rope_dim=head_dim if rotary else 0, rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    layers = group_layers(windowed if is_sliding else full for is_sliding in sliding)
    return config.model(model_type, attention, layers)


def _refuse_foreign_keys(config: ConfigReader, rule: Rule, model_type: str) -> None:
    """Keys that mean something in another of these families and may change the cache in this one."""
    foreign = []
    if rule.windows == "none":
        config.refuse("sliding_window", "this family has no sliding window")
        foreign += ["sliding_window_size", "sliding_window_pattern", "_sliding_window_pattern"]
    if rule.windows != "switched":
        foreign += ["use_sliding_window", "max_window_layers"]
    if not rule.has_layer_types and any(kind != "full_attention" for kind in config.items("layer_types")):
        foreign.append("layer_types")
    if model_type != "generic":
        foreign.append("v_head_dim")
    for key in foreign:
        config.refuse(key, f"may change the cache and {model_type}'s reader does not know it")


def layer_types(config: ConfigReader, rule: Rule, num_layers: int) -> list[str]:
    """The kind of every layer: the config's own list where the family has one, else the family's pattern."""
    stated = config.strings("layer_types", num_layers, LAYER_TYPES) if rule.has_layer_types else None
    if rule.windows == "switched" and not config.boolean("use_sliding_window", default=False):
        return ["full_attention"] * num_layers
    window = config.optional_integer(*WINDOW_KEYS, least=0)
    if not window:
        if stated is not None and "sliding_attention" in stated:
            raise ModelError(f"{config.name}: layer_types has sliding_attention and there is no sliding_window")
        return ["full_attention"] * num_layers
    if stated is not None:
        return stated
    return ["sliding_attention" if rule.slides(number, config) else "full_attention" for number in range(num_layers)]
