"""The parameters of audio towers whose rules need more than a row of tower_weights.yaml.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, projection
from kvcalc.model.towers.weights import count
from kvcalc.model.type_tables import row_of

_WIDEST = 10**6


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
    counted = count(
        row_of("tower_weights", "phi4_multimodal_audio"), stated.renamed(names).with_values(more), text, outer
    )
    return added(counted, (0, 2 * integer(stated, 80, "input_size")))
