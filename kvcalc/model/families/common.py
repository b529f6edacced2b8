"""Functions that most families share: the keys of grouped attention, and the weights outside the mixers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.tensors import Weight, around, norm, other

NORMS = ("input_layernorm", "post_attention_layernorm")


def grouped_shape(
    config: ConfigReader, *, head_dim: int | None = None, rotary: bool = True, output_gate: bool = False,
    rope_theta: float = 10_000.0,
) -> AttentionShape:  # fmt: skip
    """Read the heads, KV heads and widths of an attention module. `rope_theta` is the default.

    If the number of KV heads is null or absent, every head has its own K and V. `head_dim` is given by families that
    compute it in their own way.
    """
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    width = head_dim or config.head_dim(hidden_size, num_heads)
    num_kv_heads = config.check_groups(num_heads, config.optional_integer("num_key_value_heads") or num_heads)
    bias = config.boolean("attention_bias", default=False)
    return AttentionShape(
        num_heads, num_kv_heads, width, width, hidden_size, qkv_bias=bias, output_bias=bias,
        rope_dim=width if rotary else 0, rope_theta=config.number("rope_theta", default=rope_theta),
        output_gate=output_gate,
    )  # fmt: skip


def latent_shape(config: ConfigReader, *, least_rope: int = 1, v_head_dim: int | None = None) -> AttentionShape:
    """Read the heads and widths of MLA, whose rotary key has at least `least_rope` elements.

    `v_head_dim` is given by families that compute it in their own way.
    """
    heads, rope = config.integer("num_attention_heads"), config.integer("qk_rope_head_dim", least=least_rope)
    return AttentionShape(
        heads, heads, config.integer("qk_nope_head_dim") + rope, v_head_dim or config.integer("v_head_dim"),
        config.integer("hidden_size"), rope_dim=rope, rope_theta=config.number("rope_theta", default=10_000.0),
        kv_lora_rank=config.integer("kv_lora_rank"), q_lora_rank=config.optional_integer("q_lora_rank") or 0,
        qk_rope_head_dim=rope,
    )  # fmt: skip


def decoder_body(
    config: ConfigReader,
    mlps: Sequence[tuple[Weight, ...]],
    *outer: Weight,
    hidden_size: int | None = None,
    norms: Sequence[str] = NORMS,
    last: str | None = "model.norm",
    tied: bool = False,
    norm_bias: bool = False,
    **named: Any,
) -> Body:
    """Return the weights outside the mixers of a decoder.

    These are `mlps` (one per layer), the norms, the last norm, `outer`, the embedding and the head. `hidden_size` is by
    default the config's, and `tied` is the default of tie_word_embeddings. `norm_bias`: the norms have a shift. `named`
    are other arguments of `around`.
    """
    width = hidden_size or config.integer("hidden_size")
    is_tied = config.boolean("tie_word_embeddings", default=tied)
    ends = outer if last is None else (norm(last, width, norm_bias), *outer)
    made = around(config.integer("vocab_size"), width, is_tied, *ends, **named)
    return Body(made, mlps, tuple(norm(name, width, norm_bias) for name in norms))


def hyper_connection(name: str, width: int, streams: int, rows: int, scales: int) -> tuple[Weight, ...]:
    """The weights of a hyper-connection, which weighs the residual streams, and mixes them if it has more rows."""
    return other(f"{name}.fn", rows, streams * width), other(f"{name}.base", rows), other(f"{name}.scale", scales)
