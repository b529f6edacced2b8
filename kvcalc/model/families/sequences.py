"""More encoder-decoders: K and V of the decoder's own tokens, and once of the encoder's output.

Their weights are not counted. presets/types/sequences.yaml has one row for each type. BART, T5, Whisper and their like
are in `encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.type_tables import row_of
from kvcalc.records import NamedTuple


class Decoder(NamedTuple):
    """The config keys of a decoder, the most common one first. `width` is the key of a head's width, if there is one.

    `cross_heads` and `cross_width` are the keys for cross-attention, if it has its own. `full_every`: every so manieth
    layer has no window, and the others have one; 0 if there are no windows. `has_cross` is False for a decoder that
    has no encoder of its own.
    """

    layers: tuple[str, ...] = ("decoder_layers", "num_hidden_layers")
    heads: tuple[str, ...] = ("decoder_attention_heads", "num_attention_heads")
    hidden: tuple[str, ...] = ("d_model", "hidden_size")
    kv_heads: str = ""
    width: str = ""
    cross_heads: str = ""
    cross_width: str = ""
    positions: tuple[str, ...] = ("max_position_embeddings",)
    full_every: int = 0
    has_cross: bool = True
    defaults: Mapping[str, object] = {}


def facts_of(row: Mapping[str, Any]) -> Decoder:
    """The facts in a row. TypeError for a field that there is not."""
    facts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Decoder(**facts)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer has attention to the decoder's tokens, in Gemma's of all tokens or of a window, and to the encoder.

    Cross-attention keeps all of the encoder's output, and has the same heads unless the config gives its own.
    """
    keys = facts_of(row_of("sequences", model_type))
    config = config.with_defaults(keys.defaults)
    # T5's num_layers is the encoder's unless the decoder has no number of its own.
    layers = next((key for key in keys.layers if config.has(key)), keys.layers[0])
    num_layers, heads = config.num_layers(layers), config.integer(*keys.heads)
    hidden_size = config.integer(*keys.hidden)
    kv_heads = config.optional_integer(keys.kv_heads) if keys.kv_heads else None
    stated = config.optional_integer(keys.width) if keys.width else None
    width = stated or config.head_dim(hidden_size, heads)
    shape = AttentionShape(heads, config.check_groups(heads, kv_heads or heads), width, width, hidden_size)
    across = shape
    if keys.cross_heads:
        width = config.integer(keys.cross_width)
        across = AttentionShape(heads, config.integer(keys.cross_heads), width, width, hidden_size)
    more: tuple[Mixer, ...] = (Attention(across, is_cross=True),) if keys.has_cross else ()
    full: tuple[Mixer, ...] = (Attention(shape), *more)
    slides = _sliding_layers(config, keys, num_layers)
    window = config.integer("sliding_window") if any(slides) else None
    windowed: tuple[Mixer, ...] = (Attention(shape, window), *more)
    mixers = [windowed if is_windowed else full for is_windowed in slides]
    return config.model(model_type, mixers, attention=shape, positions=keys.positions)


def _sliding_layers(config: ConfigReader, keys: Decoder, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    if not keys.full_every:
        config.refuse("sliding_window", "this family has no sliding window")
        return [False] * num_layers
    return [(number + 1) % keys.full_every != 0 for number in range(num_layers)]
