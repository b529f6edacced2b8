"""The parameters of vision towers of one family each, whose neighbouring patches become one token.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, number_of, patches, projection, side
from kvcalc.model.towers.bodies import siglip, vit


def _with(config: ConfigReader, **stated: object) -> ConfigReader:
    """The config with other defaults."""
    return config.with_defaults(stated)


def _area(config: ConfigReader, key: str, default: int) -> int:
    """The product of the two integers under `key`."""
    sides = config.integers(key, least=1, most=1000)
    return sides[0] * sides[-1] if sides else default


def ernie(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Two mergers, in space and over two frames, and a linear layer between two norms."""
    width, _, tower = vit(vision, 32, 1280, 5120, "depth")
    patch = integer(vision, 14, "patch_size")
    merged = width * integer(vision, 2, "spatial_merge_size") ** 2
    frames = merged * integer(vision, 2, "temporal_merge_size")
    whole = integer(vision, 3, "in_channels") * patch * patch * width + 2 * width
    whole += 3 * projection(merged, merged) + projection(frames, merged) + 4 * merged
    return added(tower, (0, whole + projection(merged, text) + text))


def minicpm(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head, attention within windows that become one patch, and mergers behind it."""
    tower = siglip(_with(vision, vision_use_head=False))
    width, inner = integer(vision, 768, "hidden_size"), integer(vision, 3072, "intermediate_size")
    area = _area(vision, "window_kernel_size", 4)
    window, merged = width * area, 4 * width
    whole = 4 * projection(width, width) + 2 * width + 2 * window
    whole += projection(window, inner * area) + projection(inner * area, width)
    times = integer(outer, 1, "merger_times")
    whole += (times - 1) * (2 * merged + projection(merged, merged) + projection(merged, width))
    return added(tower, (0, whole + 2 * merged + projection(merged, merged) + projection(merged, text)))


def step3p7(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Scaled layers, and two convolutions that halve both sides. The class ignores intermediate_size."""
    width, number = integer(vision, 1536, "hidden_size", "width"), num_layers(vision, 47, "num_hidden_layers", "layers")
    inner = int(width * vision.number("mlp_ratio", 8960 / 1536))
    tower = layers(number, width, inner, biases=5 * width + inner, norms=6 * width)
    count, patch = patches(vision, 728, 14)
    whole = (integer(vision, 3, "num_channels") * patch * patch + 2 + count) * width
    whole += projection(9 * width, 2 * width) + projection(18 * width, 4 * width)
    return added(tower, (0, whole + projection(4 * width, text, outer.boolean("projector_bias", False))))


def lfm3_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """LFM's layers: short convolutions over the grid of patches, and attention in some layers."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 2560, "intermediate_size")
    number, heads = num_layers(vision, 14, "num_hidden_layers"), integer(vision, 16, "num_attention_heads")
    kinds = vision.strings("layer_types", number, ("conv", "full_attention"))
    kinds = kinds or ["conv" if n < 2 or n % 2 else "full_attention" for n in range(number)]
    with_attention, head = kinds.count("full_attention"), width // max(heads, 1)
    kv = integer(vision, 8, "num_key_value_heads") * head
    tower = layers(with_attention, width, inner, matrices=3, heads=heads * head, kv=kv, norms=2 * width + 2 * head)
    kernel = integer(vision, 3, "conv_kernel_size") ** 2
    convolved = (number - with_attention) * (4 * width * width + 3 * width * inner)
    small = (number - with_attention) * (kernel + 2) * width
    patch, frames = side(vision, "patch_size", 16), side(vision, "temporal_patch_size", 2)
    whole = integer(vision, 3, "in_channels") * frames * patch * patch * width + width + 2 * width
    merged, middle = (
        width * integer(vision, 2, "spatial_merge_size") ** 2,
        integer(outer, 4096, "projector_hidden_size"),
    )
    bias = outer.boolean("projector_bias", True)
    whole += projection(merged, middle, bias) + projection(middle, text, bias)
    return added(tower, (convolved, small + whole))


def hunyuan_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Positions for the largest image and one more, and learned vectors at the edges of an image."""
    width, _, tower = vit(
        _with(vision, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27)
    )  # fmt: skip
    patch, area = side(vision, "patch_size", 16), integer(vision, 2, "spatial_merge_size") ** 2
    out = integer(vision, 3072, "text_hidden_size")
    positions = (integer(vision, 2048, "max_image_size") // patch) ** 2 + 1
    whole = projection(integer(vision, 3, "num_channels") * patch * patch, width) + positions * width
    whole += projection(area * width, 2 * width) + projection(2 * width, 4 * width) + projection(4 * width, out)
    return added(tower, (0, whole + 5 * width + 4 * out))


def cosmos3_edge(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP 2 without a head, a norm, and two linear layers."""
    stated = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_patches": 256}
    vision = _with(vision, **stated, vision_use_head=False)
    width, middle = integer(vision, 1152, "hidden_size"), integer(outer, 11520, "projector_hidden_size")
    merged = width * integer(vision, 2, "spatial_merge_size") ** 2
    return added(siglip(vision), (0, 2 * width + projection(merged, middle) + projection(middle, text)))


def granite_docling(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head; a coarse and, in some models, a fine way of merging patches, both with deepstack."""
    vision = _with(vision, image_size=512, vision_use_head=False)
    width, out = integer(vision, 768, "hidden_size"), integer(vision, 1024, "out_hidden_size")
    number = vision.number_of("deepstack_visual_indexes", 3)
    scale, whole = integer(vision, 4, "scale_factor"), 2 * width + 4 * out + out * out
    for by in (scale, scale // 2) if vision.boolean("use_fine_route", False) else (scale,):
        merged = width * by * by
        whole += merged * out + number * (2 * merged + projection(merged, out) + projection(out, out))
    return added(siglip(vision), (0, whole))


def muse(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Patches of two frames, a table of positions, and three linear layers without biases."""
    vision = _with(vision, hidden_size=1536, intermediate_size=8960, num_hidden_layers=50)
    width, _, tower = vit(vision)
    grid = integer(vision, 32, "pos_emb_height") * integer(vision, 32, "pos_emb_width")
    patch = integer(vision, 14, "patch_size")
    whole = (3 * integer(vision, 2, "patch_temporal") * patch * patch + grid + 4) * width
    merged = integer(outer, width * integer(vision, 2, "merge_size") ** 2, "out_hidden_size")
    middle = integer(outer, 4096, "projector_hidden_size")
    return added(tower, (0, whole + (merged + middle + text) * middle))


def inkling2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Scaled layers, and a class token with a position of its own."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 4096, "intermediate_size")
    tower = layers(
        num_layers(vision, 23, "num_hidden_layers"), width, inner, biases=5 * width + inner, norms=6 * width
    )  # fmt: skip
    patch, merged = integer(vision, 20, "patch_size"), width * integer(vision, 2, "spatial_merge_size") ** 2
    whole = (integer(vision, 3, "num_channels") * patch * patch + 4) * width
    whole += integer(vision, 32, "posemb_grid_size") ** 2 * width
    middle, bias = integer(vision, 4096, "projection_hidden_dim"), vision.boolean("projector_bias", False)
    out = integer(vision, text, "text_hidden_size")
    return added(tower, (0, whole + projection(merged, middle, bias) + projection(middle, out, bias)))


def radio(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """RADIO's scaled layers, positions for the largest image, and class and register tokens; no last norm."""
    width = integer(vision, 1280, "hidden_size")
    inner = int(width * vision.number("mlp_ratio", 4))
    biases = 2 * width + inner + (3 * width if vision.boolean("qkv_bias", True) else 0)
    tower = layers(num_layers(vision, 32, "num_hidden_layers"), width, inner, biases=biases, norms=6 * width)
    if vision.boolean("use_swiglu_ffn", False):
        raise ModelError(f"{vision.name}: use_swiglu_ffn is not counted")
    patch, frames = side(vision, "patch_size", 16), vision.optional_integer("video_temporal_patch_size")
    pixels = integer(vision, 3 * patch * patch, "patch_dim")
    video = integer(vision, pixels * (frames or 0), "video_patch_dim")
    tokens = number_of(vision, 3, "num_cls_tokens") + number_of(vision, 7, "num_registers")
    whole = (pixels + video + (integer(vision, 2048, "max_img_size") // patch) ** 2 + tokens) * width
    own = integer(outer, 1280, "vision_hidden_size", "vit_hidden_size")
    merged = own * int(1 / outer.number("downsample_ratio", 0.5)) ** 2
    middle = integer(outer, 4096, "projector_hidden_size")
    # Checkpoints with MTP layers have a last norm.
    whole += 2 * own if integer(outer.nested("text_config"), 0, "num_nextn_predict_layers") else 0
    return added(tower, (0, whole + merged + merged * middle + middle * text))


def florence2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """DaViT: four stages, whose blocks attend within windows and then among channels; tables of positions."""
    widths = vision.integers("embed_dim", least=1, most=10**6) or [128, 256, 512, 1024]
    depths = vision.integers("depths", most=1000) or [1, 1, 9, 1]
    kernels = vision.integers("patch_size", least=1, most=1000) or [7, 3, 3, 3]
    before = vision.listed("patch_prenorm") or [False, True, True, True]
    if len({len(widths), len(depths), len(kernels), len(before)}) != 1:
        raise ModelError(f"{vision.name}: embed_dim, depths, patch_size and patch_prenorm differ in length")
    split, whole, inputs = 0, 0, integer(vision, 3, "in_channels")
    for width, depth, kernel, normed in zip(widths, depths, kernels, before):
        inner = int(width * vision.number("mlp_ratio", 4))
        bias = 3 * width if vision.boolean("qkv_bias", True) else 0
        matrices, small = layers(2 * depth, width, inner, biases=2 * width + inner + bias, norms=4 * width)
        split += matrices
        whole += small + 2 * depth * 2 * 10 * width
        whole += projection(kernel * kernel * inputs, width) + 2 * (inputs if normed else width)
        inputs = width
    out, rows = integer(vision, text, "projection_dim"), integer(vision, 50, "max_position_embeddings")
    return split, whole + inputs * out + 2 * out + rows * inputs
