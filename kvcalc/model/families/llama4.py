"""Llama 4: attention in chunks, but for every fourth layer, which sees all and has no rotary positions."""

from __future__ import annotations

from kvcalc.model.caches import Cache, ChunkedAttention, FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim attention_chunk_size "
        "no_rope_layers no_rope_layer_interval layer_types attention_bias rope_theta rope_scaling rope_parameters "
        "num_local_experts num_experts_per_tok interleave_moe_layer_step moe_layers intermediate_size_mlp "
        "use_qk_norm attn_scale attn_temperature_tuning floor_scale rms_norm_eps for_llm_compressor"
    ).split()
)

# Source: Llama4TextConfig, Transformers 5.23.0.
_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Chunks where a layer has rotary positions (no_rope_layers holds 1 for these), else all tokens."""
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    num_kv_heads = config.check_groups(num_heads, config.optional_integer("num_key_value_heads") or num_heads)
    full: tuple[Cache, ...] = (FullAttention(num_kv_heads, head_dim, head_dim),)
    chunk = config.optional_integer("attention_chunk_size")
    chunked = full if chunk is None else (ChunkedAttention(chunk, num_kv_heads, head_dim, head_dim),)
    bias = config.boolean("attention_bias", default=False)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias, rope_dim=head_dim,
        rope_theta=config.number("rope_theta", default=500_000.0),
    )  # fmt: skip
    layers = group_layers(chunked if is_chunked else full for is_chunked in _chunked_layers(config, num_layers))
    return config.model(model_type, attention, layers)


def _chunked_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    stated = config.strings("layer_types", num_layers, ("full_attention", "chunked_attention"))
    if stated is not None:
        return [kind == "chunked_attention" for kind in stated]
    if config.config.get("no_rope_layers"):
        return config.flags("no_rope_layers", num_layers)
    interval = config.integer("no_rope_layer_interval")
    return [(number + 1) % interval != 0 for number in range(num_layers)]
