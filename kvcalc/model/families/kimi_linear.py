"""Kimi Linear and Kimi K3: Kimi delta attention, with MLA in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.caches import Cache, LatentAttention, RecurrentState
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim kv_lora_rank q_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate linear_attn_config "
        "linear_head_dim linear_num_heads linear_conv_kernel_dim layer_types mlp_layer_types model_max_length "
        "rope_theta rope_scaling rope_parameters num_experts num_experts_per_token num_shared_experts "
        "routed_expert_hidden_size "
        "moe_intermediate_size moe_layer_freq moe_renormalize moe_router_activation_func first_k_dense_replace "
        "num_expert_group topk_group routed_scaling_factor use_grouped_topk rms_norm_eps num_nextn_predict_layers "
        "attn_res_block_size latent_moe_use_norm activation_situ_linear_beta activation_situ_beta"
    ).split()
)

# Source: KimiLinearConfig, Transformers 5.23.0.
_DEFAULTS = {"linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
_NESTED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
           "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A latent and a rotary key in layers of full attention; in the others a state of head_dim x head_dim a head, in
    fp32, and convolutions over queries, keys and values. Source: KimiLinearDeltaAttention, Transformers 5.23.0.
    """
    nested = config.config.get("linear_attn_config")
    nested = nested if isinstance(nested, Mapping) else {}
    config = config.with_defaults(
        {**_DEFAULTS, **{flat: nested[key] for key, flat in _NESTED.items() if key in nested}}
    )
    num_layers = config.num_layers("num_hidden_layers")
    num_heads, rope = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim")
    rank = config.integer("kv_lora_rank")
    shape = AttentionShape(
        num_heads, num_heads, config.integer("qk_nope_head_dim") + rope, config.integer("v_head_dim"),
        config.integer("hidden_size"), rope_dim=rope, rope_theta=config.number("rope_theta", default=10_000.0),
        kv_lora_rank=rank, q_lora_rank=config.optional_integer("q_lora_rank") or 0, qk_rope_head_dim=rope,
    )  # fmt: skip
    heads, width = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    state: tuple[Cache, ...] = (
        RecurrentState(
            3 * heads * width, config.integer("linear_conv_kernel_dim"), heads * width * width, num_heads=heads
        ),
    )
    latent: tuple[Cache, ...] = (LatentAttention(rank, rope),)
    full = full_layers(config, nested, num_layers)
    layers = group_layers(latent if is_full else state for is_full in full)
    return config.model(model_type, shape, layers, positions=("max_position_embeddings", "model_max_length"))


def full_layers(config: ConfigReader, nested: Mapping[str, object], num_layers: int) -> list[bool]:
    """linear_attn_config numbers the layers from 1, each once, in full_attn_layers or kda_layers."""
    kinds = config.strings("layer_types", num_layers, ("linear_attention", "full_attention"))
    if kinds is not None:
        return [kind == "full_attention" for kind in kinds]
    if "full_attn_layers" not in nested or "kda_layers" not in nested:
        raise config.error("layer_types is missing, and so are full_attn_layers and kda_layers of linear_attn_config")
    inner = ConfigReader(nested, f"{config.name}: linear_attn_config", config.source)
    full, delta = (inner.integers(key, least=1, most=num_layers) for key in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        raise config.error(f"full_attn_layers and kda_layers must name each of {num_layers} layers once")
    return [number in full for number in range(1, num_layers + 1)]
