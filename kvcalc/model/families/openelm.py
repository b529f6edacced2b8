"""OpenELM: heads, and KV heads, of a number of their own in every layer."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import Cache, FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_transformer_layers head_dim model_dim num_query_heads num_kv_heads num_gqa_groups qkv_multipliers "
        "max_context_length rope_max_length rope_freq_constant ffn_dim_divisor ffn_multipliers ffn_with_glu "
        "normalize_qk_projections share_input_output_layers"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of num_kv_heads heads, listed by layer. Source: modeling_openelm.py of apple/OpenELM-3B."""
    num_layers = config.num_layers("num_transformer_layers")
    head_dim = config.integer("head_dim")
    query_heads, kv_heads = (_by_layer(config, key, num_layers) for key in ("num_query_heads", "num_kv_heads"))
    layers: list[tuple[Cache, ...]] = [
        (FullAttention(config.check_groups(heads, kept), head_dim, head_dim),)
        for heads, kept in zip(query_heads, kv_heads)
    ]
    attention = AttentionShape(
        query_heads[0], kv_heads[0], head_dim, head_dim, config.integer("model_dim"), rope_dim=head_dim,
        rope_theta=config.number("rope_freq_constant", default=10_000.0),
    )  # fmt: skip
    return config.model(model_type, attention, group_layers(layers), positions=("max_context_length",))


def _by_layer(config: ConfigReader, key: str, num_layers: int) -> list[int]:
    listed = config.config.get(key)
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelError(f"{config.name}: {key} must be a list of {num_layers}, one for each layer")
    return [ConfigReader({key: heads}, config.name, config.source).integer(key) for heads in listed]
