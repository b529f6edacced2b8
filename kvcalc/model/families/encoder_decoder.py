"""Encoder-decoders: every decoder layer keeps K and V of its own tokens and of the encoder's output."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.model.caches import CrossAttention, FullAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_layers num_decoder_layers num_hidden_layers num_heads num_attention_heads d_model hidden_size d_kv d_ff "
        "n_positions relative_attention_num_buckets relative_attention_max_distance feed_forward_proj "
        "encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim "
        "decoder_ffn_dim max_source_positions max_target_positions num_mel_bins scale_embedding is_encoder_decoder "
        "add_cross_attention cross_attention_hidden_size"
    ).split()
)


class _Keys(NamedTuple):
    """Where a family states its decoder: layers (best known key first), heads, width, and the longest context."""

    layers: tuple[str, ...]
    heads: tuple[str, ...]
    positions: tuple[str, ...]
    has_bias: bool


_T5 = _Keys(("num_decoder_layers", "num_layers"), ("num_heads",), (), has_bias=False)
_BART = _Keys(("decoder_layers",), ("decoder_attention_heads",), ("max_position_embeddings",), has_bias=True)
_WHISPER = _Keys(("decoder_layers",), ("decoder_attention_heads",), ("max_target_positions",), has_bias=True)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every head, of the decoder's tokens and, once, of the encoder's output.

    T5 states its head width (d_kv) and may have fewer decoder layers than layers; its positions are relative, so that
    n_positions is no limit. Whisper's encoder always gives max_source_positions. Source: T5Config, BartConfig and
    WhisperConfig, Transformers 5.23.0.
    """
    keys = _T5 if model_type in ("t5", "mt5", "umt5") else _WHISPER if model_type == "whisper" else _BART
    num_heads, hidden_size = config.integer(*keys.heads), config.integer("d_model", "hidden_size")
    num_layers = config.num_layers(next((key for key in keys.layers if config.config.get(key)), keys.layers[0]))
    width = config.integer("d_kv") if keys is _T5 else config.head_dim(hidden_size, num_heads)
    shape = AttentionShape(
        num_heads, num_heads, width, width, hidden_size, qkv_bias=keys.has_bias, output_bias=keys.has_bias
    )
    layers = uniform_layers(num_layers, FullAttention(num_heads, width, width), CrossAttention(num_heads, width, width))
    fixed = config.integer("max_source_positions") if keys is _WHISPER else None
    return config.model(
        model_type, shape, layers, positions=keys.positions, encoder_tokens=fixed, has_fixed_encoder=fixed is not None
    )
