"""The parameters of audio towers and of the projectors behind them, by type.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, projection


def _whisper(audio: ConfigReader, *, has_positions: bool = True) -> Counted:
    """Whisper's encoder: two convolutions over mel bins, a table of positions, and no bias on the keys."""
    width = integer(audio, 1280, "d_model", "hidden_size")
    inner = integer(audio, 5120, "encoder_ffn_dim", "intermediate_size")
    body = layers(
        num_layers(audio, 32, "encoder_layers", "num_hidden_layers"), width, inner, biases=4 * width + inner,
        norms=4 * width,
    )  # fmt: skip
    whole = projection(3 * integer(audio, 128, "num_mel_bins"), width) + projection(3 * width, width) + 2 * width
    whole += integer(audio, 1500, "max_source_positions") * width if has_positions else 0
    return added(body, (0, whole))


def qwen2_audio(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Whisper and one linear layer."""
    return added(_whisper(audio), (0, projection(integer(audio, 1280, "d_model"), text)))


def minicpmo(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Whisper and two linear layers (MiniCPMO.init_audio_module, model_executor/models/minicpmo.py, vLLM 0.33.0)."""
    stated = {"d_model": 384, "encoder_layers": 4, "encoder_ffn_dim": 1536, "num_mel_bins": 80}
    audio = audio.with_defaults(stated)
    inputs = integer(audio, 1536, "encoder_ffn_dim") // 4
    return added(_whisper(audio), (0, projection(inputs, text) + projection(text, text)))


def qwen2_5_omni(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Computed positions, and two vectors that begin and end a clip."""
    out = integer(audio, 3584, "output_dim")
    whole = 2 * out + projection(integer(audio, 1280, "d_model"), out)
    return added(_whisper(audio, has_positions=False), (0, whole))


def voxtral(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Four frames become a token."""
    inputs = integer(audio, 5120, "intermediate_size", "encoder_ffn_dim")
    return added(_whisper(audio), (0, inputs * text + text * text))


def qwen3_omni(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Three 2D convolutions with a stride of 2 in front of the layers, and two linear layers behind them."""
    width, inner = integer(audio, 1280, "d_model"), integer(audio, 5120, "encoder_ffn_dim")
    number, channels = num_layers(audio, 32, "encoder_layers"), integer(audio, 480, "downsample_hidden_size")
    body = layers(number, width, inner, biases=5 * width + inner, norms=4 * width)
    bins = integer(audio, 128, "num_mel_bins")
    for _ in range(3):
        bins = (bins + 1) // 2
    whole = projection(9, channels) + 2 * projection(9 * channels, channels) + channels * bins * width + 2 * width
    return added(body, (0, whole + projection(width, width) + projection(width, integer(audio, 3584, "output_dim"))))


def audio_flamingo(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Two linear layers behind the tower."""
    bias = outer.boolean("projector_bias", True)
    inputs = integer(audio, 1280, "d_model", "hidden_size")
    return added(_whisper(audio), (0, projection(inputs, text, bias) + projection(text, text, bias)))


def glm_asr(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Rotary positions, and four frames that become a token. Queries, values and outputs have biases."""
    inputs = integer(audio, 5120, "intermediate_size", "encoder_ffn_dim")
    whole = projection(inputs, 2 * text) + projection(2 * text, text)
    return added(_whisper(audio, has_positions=False), (0, whole))


def gemma4(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A conformer: two MLPs, attention and a convolution in every layer. Its kernels are not split."""
    width, number = integer(audio, 1024, "hidden_size"), num_layers(audio, 12, "num_hidden_layers")
    heads, kernel = integer(audio, 8, "num_attention_heads"), integer(audio, 5, "conv_kernel_size")
    first, second = audio.pair("subsampling_conv_channels", (128, 32))
    layer = 16 * width * width + 5 * width * width + 3 * width * width
    small = 9 * width + width // max(heads, 1) + kernel * width
    out = integer(audio, 1536, "output_proj_dims")
    whole = 9 * first + first + 9 * first * second + second + second * 32 * width + projection(width, out) + out * text
    return number * layer, number * small + whole


def gemma4_unified(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """No layers: a frame goes straight into the language model."""
    return 0, integer(audio, 640, "audio_embed_dim") * text


def moss(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Several frames become a token: two linear layers and a norm."""
    inputs = integer(audio, 1024, "hidden_size") * integer(outer, 4, "audio_merge_size")
    bias, stated = outer.boolean("projector_bias", True), {"hidden_size": 1024, "intermediate_size": 4096}
    more = {"num_hidden_layers": 24, "num_mel_bins": 80}
    audio = audio.with_defaults({**stated, **more})
    return added(_whisper(audio), (0, projection(inputs, text, bias) + projection(text, text, bias) + 2 * text))
