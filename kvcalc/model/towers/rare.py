"""The parameters of towers whose layers are those of no other family: Dots 3 Note, Muse Spark, Inkling and Fun-ASR.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, projection

_WIDEST = 10**6


def dots3_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Norms on queries and keys, and experts in the last layers, whose number may differ."""
    width, inner = integer(vision, 1536, "hidden_size"), integer(vision, 4224, "intermediate_size")
    number, own = num_layers(vision, 42, "num_hidden_layers"), integer(vision, 2112, "moe_intermediate_size")
    kinds = vision.strings("mlp_layer_types", number, ("dense", "sparse"))
    if kinds is None or vision.boolean("attention_bias", False) or vision.boolean("mlp_bias", False):
        raise ModelError(f"{vision.name}: towers with biases or without mlp_layer_types are not counted")
    head = width // max(integer(vision, 24, "num_attention_heads"), 1)
    split, whole = layers(number, width, 0, norms=2 * width + 2 * head)
    stated = vision.per_layer(number) or [{}] * number
    for kind, more in zip(kinds, stated):
        experts = integer(vision.with_values(more), 64, "num_local_experts")
        split += experts * 3 * width * own if kind == "sparse" else 3 * width * inner
        whole += experts * width if kind == "sparse" else 0
    patch, taken = integer(vision, 14, "patch_size"), integer(vision, 1536, "adapter_in_dim")
    merged = taken * integer(vision, 2, "adapter_merge_size") ** 2
    whole += projection(integer(vision, 3, "num_channels") * patch * patch, width) + 2 * width + 2 * taken
    whole += projection(merged, merged) + projection(merged, integer(vision, 5120, "adapter_out_dim"))
    return split, whole


def dots3_audio(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Three 2D convolutions with a stride of 2, layers without a bias on the keys, and an adapter."""
    width, inner = integer(audio, 1280, "hidden_size"), integer(audio, 5120, "intermediate_size")
    channels, out = integer(audio, 480, "downsample_hidden_size"), integer(audio, 5120, "adapter_out_dim")
    tower = layers(
        num_layers(audio, 32, "num_hidden_layers"), width, inner, matrices=3, biases=4 * width + 2 * inner,
        norms=2 * width,
    )  # fmt: skip
    whole = projection(9, channels) + 2 * projection(9 * channels, channels)
    taken = integer(audio, 1280, "adapter_input_size")
    whole += integer(audio, 7680, "conv_output_size") * width + width + 2 * taken
    return added(tower, (0, whole + projection(taken, out) + projection(out, out)))


def muse_spark(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Stages of convolutions over time, each with patches of the one before it."""
    widths = audio.integers("hidden_sizes", least=1, most=_WIDEST) or [256, 512, 1024, 2048]
    patches = audio.integers("patch_sizes", least=1, most=_WIDEST) or [16, 6, 5, 4]
    depths = audio.integers("depths", most=1000) or [2, 2, 2, 2]
    if not len(widths) == len(patches) == len(depths):
        raise ModelError(f"{audio.name}: hidden_sizes, patch_sizes and depths differ in length")
    split, whole, before = 0, 0, 1
    for width, patch, depth in zip(widths, patches, depths):
        inner = int(width * audio.number("mlp_ratio", 4))
        split += depth * 2 * width * inner
        whole += depth * ((integer(audio, 7, "conv_kernel_size") + 3) * width + inner)
        whole += projection(patch * before, width) + width
        before = width
    out = integer(audio, 8192, "out_hidden_size")
    return split, whole + before + projection(before, out) + out


def inkling(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A table for the value of every mel bin, and a norm."""
    rows = integer(audio, 80, "n_mel_bins") * integer(audio, 256, "mel_vocab_size")
    out = integer(audio, text, "text_hidden_size")
    return 0, rows * out + out


def fun_asr(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Attention with a memory of convolutions. The first layer reads stacked frames; two layers end with a norm."""
    width, inner = integer(audio, 512, "hidden_size"), integer(audio, 2048, "intermediate_size")
    number, kernel = num_layers(audio, 70, "num_hidden_layers"), integer(audio, 11, "fsmn_kernel_size")
    frames = integer(audio, 80, "num_mel_bins") * integer(audio, 7, "num_stacked_frames")
    tower = layers(number, width, inner, biases=5 * width + inner + kernel * width, norms=4 * width)
    whole = 2 * (frames - width) + 2 * (2 if num_layers(audio, 20, "num_timestamp_prediction_layers") else 1) * width
    adaptor = outer.nested("adaptor_config")
    own, middle = integer(adaptor, 1024, "hidden_size"), integer(adaptor, 256, "intermediate_size")
    joined = integer(adaptor, 2048, "projector_hidden_size")
    more = layers(
        num_layers(adaptor, 2, "num_hidden_layers"), own, middle, biases=5 * own + middle, norms=4 * own
    )  # fmt: skip
    whole += projection(width, joined) + projection(joined, own)
    return added(tower, more, (3 * width * (frames - width), whole))
