"""Plain decoders: llama, mistral, and `generic` for models given by flags or known from a paper alone."""

from __future__ import annotations

from kvcalc.model.caches import Cache, FullAttention, SlidingWindowAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim sliding_window "
        "attention_bias mlp_bias position_embedding_type rope_theta rope_scaling rope_parameters rms_norm_eps"
    ).split()
)

# Transformers' MistralConfig has this window where the key is absent; an explicit null means none.
# Source: configuration_mistral.py, Transformers 5.23.0.
_MISTRAL_WINDOW = 4096


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A decoder whose layers are alike: K and V of num_key_value_heads heads, within a window where there is one."""
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.optional_integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    num_kv_heads = config.check_groups(num_heads, config.optional_integer("num_key_value_heads") or num_heads)
    window = config.optional_integer("sliding_window") if model_type != "llama" else None
    if model_type == "llama":
        config.refuse("sliding_window", "llama has no sliding window; mistral has")
    if model_type == "mistral" and "sliding_window" not in config.config:
        window = _MISTRAL_WINDOW
    bias = config.boolean("attention_bias", default=False)
    # Rotary positions, but for models known from a paper which says otherwise.
    rotary = config.config.get("position_embedding_type") != "absolute"
    cache: Cache = (
        FullAttention(num_kv_heads, head_dim, head_dim)
        if window is None
        else SlidingWindowAttention(window, num_kv_heads, head_dim, head_dim)
    )
    attention = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, hidden_size,
        qkv_bias=bias, output_bias=bias, rope_dim=head_dim if rotary else 0,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    return ModelSpec(
        config.name, config.source, model_type, attention, uniform_layers(num_layers, cache),
        config.optional_integer("max_position_embeddings"), config.torch_dtype(),
    )  # fmt: skip
