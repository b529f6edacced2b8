"""The parameters of audio towers made of conformers and similar layers, and of the projectors behind them.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes, and of Phi-4's published config. Kernels of convolutions over time, norms and biases
are on every rank.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, projection
from kvcalc.model.towers.queried import q_former


def _two_layers(inputs: int, text: int) -> int:
    return projection(inputs, text) + projection(text, text)


def gemma3n(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Gemma's conformer. Sounds have an embedding of their own before they are projected."""
    width, number = integer(audio, 1536, "hidden_size"), num_layers(audio, 12, "conf_num_hidden_layers")
    first, second = audio.pair("sscp_conv_channel_size", (128, 32))
    bins = -(-integer(audio, 128, "input_feat_size") // 4)
    heads = max(integer(audio, 8, "conf_num_attention_heads"), 1)
    small = 9 * width + width // heads + integer(audio, 5, "conf_conv_kernel_size") * width
    whole = 9 * first + first + 9 * first * second + second + second * bins * width
    whole += integer(audio, 128, "vocab_size") * width + 2 * width + width * text
    return number * 24 * width * width, number * small + whole


def phi4(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Convolutions that shorten the audio 8 times, a conformer, and two projectors: one is used beside images."""
    width, inner = integer(audio, 1024, "hidden_size"), integer(audio, 1536, "intermediate_size")
    number, kernel = num_layers(audio, 24, "num_blocks"), integer(audio, 3, "kernel_size")
    out, depth = integer(audio, 1024, "ext_pw_out_channel"), integer(audio, 1024, "depthwise_separable_out_channel")
    times = integer(audio, 1, "depthwise_multiplier")
    mlp, attention = 3 * width * inner, 4 * width * width
    convolved = 2 * width * out + width * times * depth + depth * out
    small = 2 * (2 * width + 2 * inner + width) + 4 * width + 2 * width + 2 * out + 2 * out
    small += (kernel + 1) * width * times + depth + out + 4 * width
    channels, halvings = (
        integer(audio, 1024, "nemo_conv_channels"),
        integer(audio, 8, "time_reduction").bit_length() - 1,
    )
    whole = projection(9, channels) + (halvings - 1) * (projection(9, channels) + projection(channels, channels))
    bins = integer(audio, 80, "input_size")
    for _ in range(halvings):
        bins = (bins + 1) // 2
    whole += projection(channels * bins, width)
    rows = integer(audio, 1000, "bias_max_distance") * (1 if audio.boolean("bias_symmetric", False) else 2)
    whole += rows * integer(audio, 16, "num_attention_heads")
    inputs = width * integer(audio, 1, "downsample_rate")
    return number * (2 * mlp + attention + convolved), number * small + whole + 2 * _two_layers(inputs, text)


def phi4mm(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Phi-4's tower under its published keys, and the mean and the variance of its input (phi4mm_audio.py, vLLM)."""
    stated = audio.nested("config")
    names = {
        "attention_dim": "hidden_size", "linear_units": "intermediate_size", "attention_heads": "num_attention_heads",
        "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
    }  # fmt: skip
    bias, channels = stated.nested("relative_attention_bias_args"), stated.nested("nemo_conv_settings")
    more = {
        "bias_max_distance": bias.optional_integer("t5_bias_max_distance"),
        "bias_symmetric": bias.boolean("t5_bias_symmetric", False),
        "nemo_conv_channels": channels.optional_integer("conv_channels"),
    }
    counted = phi4(stated.renamed(names).with_values(more), text, outer)
    return added(counted, (0, 2 * integer(stated, 80, "input_size")))


def _fast_conformer(audio: ConfigReader, *, attention_bias: bool = True) -> Counted:
    """Parakeet's conformer (FastConformer), with its convolutions that shorten the audio."""
    width, inner = integer(audio, 1024, "hidden_size"), integer(audio, 4096, "intermediate_size")
    number, heads = num_layers(audio, 24, "num_hidden_layers"), 1
    kernel = integer(audio, 9, "conv_kernel_size")
    has_bias = audio.boolean("attention_bias", attention_bias)
    split = 2 * 2 * width * inner + 5 * width * width + 3 * width * width
    small = (2 * (inner + width) + 4 * width) * has_bias + 2 * heads * width + kernel * width + 2 * width + 10 * width
    small += 4 * width if audio.boolean("convolution_bias", True) else 0
    channels = integer(audio, 256, "subsampling_conv_channels")
    area = integer(audio, 3, "subsampling_conv_kernel_size") ** 2
    halvings = integer(audio, 8, "subsampling_factor").bit_length() - 1
    whole = projection(area, channels) + (halvings - 1) * (projection(area, channels) + projection(channels, channels))
    whole += projection(channels * (integer(audio, 80, "num_mel_bins") >> halvings), width)
    return number * split, number * small + whole


def parakeet(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Parakeet. In Nemotron Omni it has no biases in attention, and a norm and two linear layers behind it."""
    if outer.word("model_type") in ("canary", "cohere_asr"):
        return _fast_conformer(audio)
    width, middle = integer(audio, 1024, "hidden_size"), integer(audio, 4096, "projection_hidden_size")
    bias = audio.boolean("projection_bias", False)
    whole = width + projection(width, middle, bias) + projection(middle, text, bias)
    return added(_fast_conformer(audio, attention_bias=False), (0, whole))


def granite_speech(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A conformer with relative positions and a head in its middle, and a Q-Former over windows of frames."""
    width, times = integer(audio, 1024, "hidden_dim"), integer(audio, 4, "feedforward_mult")
    head = integer(audio, 128, "dim_head")
    heads, inner = integer(audio, 8, "num_heads") * head, width * integer(audio, 2, "conv_expansion_factor")
    split = 4 * width * width * times + 4 * width * heads + 3 * width * inner
    small = 2 * (width * times + 3 * width) + 3 * width + 2 * width + 2 * inner + 2 * inner + width + 2 * width
    small += integer(audio, 15, "conv_kernel_size") * inner
    small += (2 * integer(audio, 512, "max_pos_emb") + 1) * head
    number, out = num_layers(audio, 10, "num_layers"), integer(audio, 42, "output_dim")
    whole = projection(integer(audio, 160, "input_dim"), width) + projection(width, out) + projection(out, width)
    former = outer.nested("projector_config")
    own = integer(former, 768, "hidden_size")
    queries = integer(outer, 15, "window_size") // max(integer(outer, 5, "downsample_rate"), 1)
    whole += queries * own + q_former(former, 1408) + projection(own, text)
    return number * split, number * small + whole


def voxtral_realtime(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Causal layers with a gated MLP, and no bias on the keys. Several frames become a token."""
    width, inner = integer(audio, 1280, "hidden_size"), integer(audio, 5120, "intermediate_size")
    heads = integer(audio, 32, "num_attention_heads")
    wide = heads * integer(audio, width // max(heads, 1), "head_dim")
    kv = integer(audio, heads, "num_key_value_heads") * (wide // max(heads, 1))
    tower = layers(
        num_layers(audio, 32, "num_hidden_layers"), width, inner, matrices=3, heads=wide, kv=kv,
        biases=wide + kv + 2 * width, norms=2 * width,
    )  # fmt: skip
    whole = projection(3 * integer(audio, 128, "num_mel_bins"), width) + projection(3 * width, width) + width
    inputs = width * integer(outer, 4, "downsample_factor")
    return added(tower, (0, whole + inputs * text + text * text))
