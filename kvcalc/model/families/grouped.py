"""The K and V heads most families state under the same keys, for readers whose layers are not all attention."""

from __future__ import annotations

from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.reader import ConfigReader


def grouped_shape(
    config: ConfigReader, *, head_dim: int | None = None, rotary: bool = True, output_gate: bool = False
) -> AttentionShape:
    """Heads, KV heads (all of them where null or absent) and widths. `head_dim` where the family derives its own."""
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    width = head_dim or config.head_dim(hidden_size, num_heads)
    num_kv_heads = config.check_groups(num_heads, config.optional_integer("num_key_value_heads") or num_heads)
    bias = config.boolean("attention_bias", default=False)
    return AttentionShape(
        num_heads, num_kv_heads, width, width, hidden_size, qkv_bias=bias, output_bias=bias,
        rope_dim=width if rotary else 0, rope_theta=config.number("rope_theta", default=10_000.0),
        output_gate=output_gate,
    )  # fmt: skip
