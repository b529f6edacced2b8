"""Decoders with K and V in every layer: plain, in a window throughout, or in a window in some layers.

What differs between them stands in `decoder_rules`; this is the one way they are read.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.families.decoder_rules import RULES, Rule
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

# Keys which mean something in some of these families, and in the others may change the cache.
OWN_KEYS = frozenset(
    (
        "sliding_window_pattern _sliding_window_pattern prefix_dense_sliding_window_pattern use_sliding_window "
        "max_window_layers keep_window_size compression_ratio global_attn_every_n_layers attention_head_dim"
    ).split()
)

KEYS = OWN_KEYS | frozenset(
    (
        "num_hidden_layers n_layer num_attention_heads n_head num_key_value_heads hidden_size n_embed head_dim "
        "v_head_dim sliding_window sliding_window_size layer_types attention_bias use_bidirectional_attention mlp_bias "
        "position_embedding_type rope_theta rope_scaling rope_parameters rms_norm_eps rope_local_base_freq "
        "use_qk_norm lm_head_bias ffn_dim word_embed_proj_dim do_layer_norm_before "
        "query_pre_attn_scalar moe_intermediate_size num_experts num_local_experts num_experts_per_tok "
        "decoder_sparse_step mlp_only_layers norm_topk_prob shared_expert_intermediate_size first_k_dense_replace "
        "n_routed_experts n_shared_experts partial_rotary_factor no_rope_layers no_rope_layer_interval "
        "mlp_layer_types num_attention_heads_per_layer moe_layer_types mtp_layer_types "
        "mtp_mlp_layer_types"
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
    head_dim = _head_dim(config, rule, hidden_size, num_heads)
    v_head_dim = config.optional_integer("v_head_dim") or head_dim
    num_kv_heads = _kv_heads(config, rule, num_heads)
    full: tuple[Cache, ...] = (FullAttention(num_kv_heads, head_dim, v_head_dim),)
    sliding = _sliding_layers(config, rule, num_layers)
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
    if rule.slides is None:
        config.refuse("sliding_window", "this family has no sliding window")
    foreign = {*OWN_KEYS} - {*rule.keys}
    if not config.config.get("sliding_window"):
        # Without a window there is no layer for it to begin at.
        foreign.discard("max_window_layers")
    if rule.switch:
        foreign -= {"use_sliding_window", "max_window_layers"}
    if rule.slides is None:
        foreign.add("sliding_window_size")
    if not rule.has_layer_types and any(kind != "full_attention" for kind in config.items("layer_types")):
        foreign.add("layer_types")
    if model_type != "generic":
        foreign.add("v_head_dim")
    for key in sorted(foreign):
        config.refuse(key, f"may change the cache and {model_type}'s reader does not know it")


def _kv_heads(config: ConfigReader, rule: Rule, num_heads: int) -> int:
    key = "num_key_value_heads"
    stated = config.integer(key) if rule.states_kv_heads else config.optional_integer(key)
    if not rule.grouped and stated not in (None, num_heads):
        raise ModelError(f"{config.name}: num_key_value_heads is {stated}: every head of this family has its own")
    return config.check_groups(num_heads, stated or num_heads)


def _head_dim(config: ConfigReader, rule: Rule, hidden_size: int | None, num_heads: int) -> int:
    head_dim = config.head_dim(hidden_size, num_heads)
    if config.optional_integer("attention_head_dim") not in (None, head_dim):
        raise ModelError(f"{config.name}: attention_head_dim is not the {head_dim} that the other keys give")
    if rule.derives_head_dim and hidden_size is not None and head_dim * num_heads != hidden_size:
        raise ModelError(f"{config.name}: head_dim is {head_dim}: this family derives it from hidden_size")
    return head_dim


def _sliding_layers(config: ConfigReader, rule: Rule, num_layers: int) -> list[bool]:
    """Which layers slide: the config's own list where the family has one, else the family's pattern."""
    stated = config.strings("layer_types", num_layers, LAYER_TYPES) if rule.has_layer_types else None
    if rule.slides is None or (rule.switch and not config.boolean("use_sliding_window", default=False)):
        return [False] * num_layers
    if not config.optional_integer(*WINDOW_KEYS, least=0):
        if stated is not None and "sliding_attention" in stated:
            raise ModelError(f"{config.name}: layer_types has sliding_attention and there is no sliding_window")
        return [False] * num_layers
    if stated is not None:
        return [kind == "sliding_attention" for kind in stated]
    config.refuse("layer_types", "contradicts the window, which this family does not list by layer")
    return rule.slides(config, num_layers)
