"""MosaicML's decoders, MPT and DBRX: the facts of attention stand in an attn_config of their own."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "n_layers num_hidden_layers n_heads num_attention_heads d_model hidden_size max_seq_len "
        "max_position_embeddings attn_config ffn_config learned_pos_emb no_bias expansion_ratio num_key_value_heads"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every head (MPT), or of attn_config's kv_n_heads (DBRX, 1 where absent).

    MPT's training code knows more kinds of attention than its published models and Transformers do: another attn_type
    than multihead_attention is refused. Source: MptAttention and DbrxAttentionConfig, Transformers 5.23.0.
    """
    inner = _attn_config(config)
    num_layers = config.num_layers("n_layers", "num_hidden_layers")
    num_heads = config.integer("n_heads", "num_attention_heads")
    hidden_size = config.integer("d_model", "hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    if model_type == "mpt":
        if inner.config.get("attn_type") not in (None, "multihead_attention"):
            raise ModelError(f"{config.name}: attn_config.attn_type: only multihead_attention is known")
        num_kv_heads = inner.optional_integer("kv_n_heads") or num_heads
        if num_kv_heads != num_heads or inner.config.get("sliding_window_size") not in (None, -1):
            raise ModelError(f"{config.name}: attn_config says kv_n_heads or sliding_window_size: not known in MPT")
    else:
        num_kv_heads = config.check_groups(num_heads, inner.optional_integer("kv_n_heads") or 1)
    if config.optional_integer("num_key_value_heads") not in (None, num_kv_heads):
        raise ModelError(f"{config.name}: num_key_value_heads contradicts attn_config")
    bias = model_type == "mpt" and not config.boolean("no_bias", default=True)
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias,
        rope_dim=head_dim if model_type == "dbrx" else 0, rope_theta=inner.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    layers = uniform_layers(num_layers, FullAttention(num_kv_heads, head_dim, head_dim))
    return config.model(model_type, attention, layers, positions=("max_seq_len", "max_position_embeddings"))


def _attn_config(config: ConfigReader) -> ConfigReader:
    inner = config.config.get("attn_config")
    if inner is None:
        inner = {}
    if not isinstance(inner, Mapping):
        raise ModelError(f"{config.name}: attn_config must be an object")
    return ConfigReader(inner, config.name, config.source)
