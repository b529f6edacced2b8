"""Qwen3-Next, Qwen3.5 and OLMo Hybrid: gated delta nets, with full attention in every fourth layer."""

from __future__ import annotations

from math import gcd

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, RecurrentState
from kvcalc.model.families.grouped import full_attention, grouped_shape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim layer_types "
        "full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads mamba_ssm_dtype attention_bias rope_theta rope_scaling "
        "rope_parameters partial_rotary_factor decoder_sparse_step mlp_only_layers moe_intermediate_size "
        "num_experts num_experts_per_tok shared_expert_intermediate_size norm_topk_prob rms_norm_eps "
        "attn_output_gate mtp_num_hidden_layers"
    ).split()
)

# Source: Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig, Transformers 5.23.0.
_SHARED = {
    "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_KV_HEADS = {"qwen3_next": 2, "qwen3_5_text": 4, "qwen3_5_moe_text": 2}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V in layers of full attention, a state in the others.

    The convolution runs over queries, keys and values of the delta net; its recurrence keeps a matrix of key width by
    value width for every value head, in fp32. Source: Qwen3NextGatedDeltaNet, Transformers 5.23.0.
    """
    config = config.with_defaults(_olmo_defaults(config) if model_type == "olmo_hybrid" else _qwen_defaults(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    if config.config.get("mamba_ssm_dtype") not in (None, "float32"):
        raise ModelError(f"{config.name}: mamba_ssm_dtype {config.config['mamba_ssm_dtype']!r}: only float32 is known")
    key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    channels = 2 * key_heads * key + value_heads * value
    state: tuple[Cache, ...] = (
        RecurrentState(
            channels,
            config.integer("linear_conv_kernel_dim"),
            value_heads * key * value,
            num_heads=gcd(key_heads, value_heads),
        ),
    )
    full: tuple[Cache, ...] = (full_attention(shape),)
    kinds = layer_types(config, num_layers)
    return config.model(model_type, shape, group_layers(full if kind == "full_attention" else state for kind in kinds))


def layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """The config's own list, else full attention in every full_attention_interval-th layer."""
    kinds = config.strings("layer_types", num_layers, ("linear_attention", "full_attention"))
    if kinds is not None:
        return kinds
    interval = config.integer("full_attention_interval")
    return ["full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(num_layers)]


def _qwen_defaults(model_type: str) -> dict[str, object]:
    return {**_SHARED, "num_key_value_heads": _KV_HEADS[model_type]}


def _olmo_defaults(config: ConfigReader) -> dict[str, object]:
    """Heads of the delta net as many as attention's; keys three quarters of a head wide, values twice that.

    Source: OlmoHybridConfig, Transformers 5.23.0.
    """
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    key_heads = config.optional_integer("linear_num_key_heads") or num_heads
    key = config.optional_integer("linear_key_head_dim") or int(0.75 * hidden_size / key_heads)
    return {
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads, "linear_key_head_dim": key, "linear_value_head_dim": 2 * key,
    }  # fmt: skip
