"""More encoder-decoders: K and V of the decoder's own tokens, and once of the encoder's output.

Their weights are not counted. BART, T5, Whisper and their like are in `encoder_decoder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple


class _Decoder(NamedTuple):
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


_BART = _Decoder()
_T5 = _Decoder(("num_decoder_layers", "num_layers"), ("num_heads",), width="d_kv", positions=())
_LLAMA = _Decoder(
    ("num_hidden_layers",), ("num_attention_heads",), ("hidden_size",), kv_heads="num_key_value_heads",
    width="head_dim",
)  # fmt: skip
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096}

# Source: the configuration and modelling files of Transformers 5.23.0.
_DECODERS: dict[str, _Decoder] = {
    **dict.fromkeys(
        "bigbird_pegasus blenderbot blenderbot-small fsmt mvp nllb-moe pegasus_x plbart pp_formulanet_text".split(),
        _BART,
    ),
    "led": _BART._replace(positions=("max_decoder_position_embeddings",)),
    "speech_to_text": _BART._replace(positions=("max_target_positions",)),
    "speecht5": _BART._replace(hidden=("hidden_size",), positions=("max_text_positions",)),
    "seamless_m4t": _BART._replace(hidden=("hidden_size",)),
    "seamless_m4t_v2": _BART._replace(hidden=("hidden_size",)),
    # Alone it is a decoder. In a model with an image encoder, that model adds the cross-attention.
    "blip_text_model": _LLAMA._replace(kv_heads="", width="", defaults={
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 8,
    }),
    "trocr": _BART._replace(has_cross=False),
    "prophetnet": _Decoder(("num_decoder_layers",), ("num_decoder_attention_heads",), ("hidden_size",)),
    **dict.fromkeys("longt5 pop2piano switch_transformers udop".split(), _T5),
    "pix2struct_text_model": _T5._replace(layers=("num_layers",), hidden=("hidden_size",), defaults={
        "num_layers": 12, "num_heads": 12, "hidden_size": 768, "d_kv": 64,
    }),
    "musicgen_decoder": _LLAMA._replace(kv_heads="", width="", defaults={
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
    "musicgen_melody_decoder": _LLAMA._replace(kv_heads="", width="", has_cross=False, defaults={
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    }),
    "canary_decoder": _LLAMA._replace(defaults={"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
                                                "num_key_value_heads": 8, "head_dim": 128}),
    "cohere_asr": _LLAMA,
    "moonshine_streaming": _LLAMA._replace(defaults={"num_attention_heads": 8}),
    "moonshine": _Decoder(
        ("decoder_num_hidden_layers",), ("decoder_num_attention_heads",), ("hidden_size",),
        kv_heads="decoder_num_key_value_heads",
    ),
    "dia_decoder": _LLAMA._replace(cross_heads="cross_num_key_value_heads", cross_width="cross_head_dim", defaults={
        "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "cross_num_key_value_heads": 16, "cross_head_dim": 128,
    }),
    "t5_gemma_module": _LLAMA._replace(full_every=2, defaults={
        "hidden_size": 2304, "num_hidden_layers": 26, **_GEMMA,
    }),
    "t5gemma2_decoder": _LLAMA._replace(full_every=6, defaults={
        "hidden_size": 2304, "num_hidden_layers": 26, **_GEMMA,
    }),
}  # fmt: skip

KEYS = frozenset(
    (
        "num_key_value_heads head_dim decoder_num_key_value_heads encoder_num_key_value_heads cross_head_dim "
        "cross_num_key_value_heads cross_num_attention_heads cross_hidden_size cross_attention_hidden_size "
        "add_cross_attention sliding_window sliding_window_pattern _sliding_window_pattern layer_types "
        "pad_head_dim_to_multiple_of attention_window num_sparse_encoder_layers num_sparse_decoder_layers "
        "encoder_sparse_step decoder_sparse_step num_conv_layers conv_kernel_sizes conv_channels "
        "num_conv_pos_embeddings num_conv_pos_embedding_groups conv_depthwise_kernel_size conv_dim conv_kernel "
        "conv_stride conv_bias"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer has attention to the decoder's tokens, in Gemma's of all tokens or of a window, and to the encoder.

    Cross-attention keeps all of the encoder's output, and has the same heads unless the config gives its own.
    """
    keys = _DECODERS[model_type]
    config = config.with_defaults(keys.defaults)
    # T5's num_layers is the encoder's unless the decoder has no number of its own.
    layers = next((key for key in keys.layers if config.config.get(key) is not None), keys.layers[0])
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


def _sliding_layers(config: ConfigReader, keys: _Decoder, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    if not keys.full_every:
        config.refuse("sliding_window", "this family has no sliding window")
        return [False] * num_layers
    return [(number + 1) % keys.full_every != 0 for number in range(num_layers)]
