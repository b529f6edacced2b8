"""How many tokens an image takes in models that resize it to one size, or keep its shape within a number of tokens.

Sources: the image processors of Transformers 5.23.0 (`tests/oracle/test_image_crops.py` asks them); glm4v.py and
openvla.py (model_executor/models) and, for Nemotron Nano VL's published configs, DynamicResolutionImageTiler
(transformers_utils/processors/nano_nemotron_vl.py) of vLLM 0.33.0; and VLChatProcessor, published with Janus-Pro, which
Transformers' Janus is.
"""

from __future__ import annotations

from math import ceil, floor, isqrt, sqrt

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, patches, side
from kvcalc.model.towers.image_rule import ImageRule, processor, tower_size
from kvcalc.search import largest_where


def _rule(vision: ConfigReader, taken: int, patches: int) -> ImageRule:
    return ImageRule(lambda width, height: taken, taken, max(patches // max(taken, 1), 1), *tower_size(vision))


def chatglm(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """GLM-4V-9B: 2 x 2 patches become a token, and two are around."""
    number = integer(vision, 1120, "image_size") // integer(vision, 14, "patch_size") // 2
    return _rule(vision, number * number + 2, 4 * number * number)


def multi_modality(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Janus: every patch of 16 pixels of an image of 384."""
    stated = vision.nested("params")
    number = integer(stated, 384, "image_size") // integer(stated, 16, "patch_size")
    return _rule(vision, number * number, number * number)


def openvla(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every patch of 14 pixels of the first tower's image."""
    sizes = outer.integers("image_sizes", least=14, most=10**5) or [224]
    return _rule(vision, (sizes[0] // 14) ** 2, (sizes[0] // 14) ** 2)


def queries(vision: ConfigReader, outer: ConfigReader, *, key: str, default: int) -> ImageRule:
    """As many tokens as there are learned queries."""
    return _rule(vision, integer(outer, default, key), patches(vision, 224, 14)[0])


def aria(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """128 tokens of an image of 490 pixels, or 256 of one of 980."""
    stated = processor(outer)
    longest, splits = integer(stated, 980, "max_image_size"), stated.boolean("split_image", False)
    if splits or longest not in (490, 980):
        raise ModelError(f"{outer.name}: Aria's images are counted without split_image, of 490 or 980 pixels")
    taken = 256 if longest == 980 else 128
    return _rule(vision, taken, (longest // side(vision, "patch_size", 14)) ** 2)


def idefics2(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """64 tokens and two around; with do_image_splitting, those of four crops as well."""
    stated = processor(outer)
    if not stated.has("do_image_splitting"):
        raise ModelError("do_image_splitting is in preprocessor_config.json, which must be beside config.json")
    each = integer(outer.nested("perceiver_config"), 64, "resampler_n_latents")
    taken = (5 if stated.boolean("do_image_splitting", False) else 1) * (each + 1) + 1
    return _rule(vision, taken, patches(vision, 980, 14)[0])


def fast_vlm(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every patch of 64 pixels of an image of 1,024."""
    return _rule(vision, 256, 256)


def muse(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The grid closest to the image's shape with at most 4,096 tokens; two around."""
    merge, most = integer(vision, 2, "merge_size"), integer(processor(outer), 4096, "max_image_tokens")
    unit = side(vision, "patch_size", 14) * merge

    def tokens(width: int, height: int) -> int:
        high, wide = height / unit, width / unit
        ratio = wide / high
        if high * wide > most:
            high = (most / ratio) ** 0.5
            wide = high * ratio
        grids = [(rows, columns) for rows in {floor(high), ceil(high)} for columns in {floor(wide), ceil(wide)}
                 if rows and columns and rows * columns <= most]  # fmt: skip
        grids = grids or [(max(1, round(high)), max(1, round(wide)))]
        rows, columns = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        return rows * columns + 2

    return ImageRule(tokens, most + 2, merge * merge, *tower_size(vision, 2, 1536, 8960))


def glm5_next(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """16 to 8,000 tokens: both sides are padded to whole tokens, of the largest image that fits."""
    stated, merge = processor(outer), integer(vision, 2, "spatial_merge_size")
    least, most = integer(stated, 16, "min_image_tokens"), integer(stated, 8000, "max_image_tokens")
    unit = integer(vision, 14, "patch_size") * merge

    def within(width: int, height: int) -> int:
        def taken(scaled: int) -> int:
            return ceil(scaled / unit) * ceil(max(1, floor(width * scaled / height)) / unit)

        scaled = largest_where(lambda scaled: taken(scaled) <= most, 0, height)
        return taken(scaled) if scaled else 1

    def tokens(width: int, height: int) -> int:
        taken = ceil(height / unit) * ceil(width / unit)
        if taken < least:
            by = sqrt(least * unit * unit / (height * width))
            taken = ceil(max(1, ceil(height * by)) / unit) * ceil(max(1, ceil(width * by)) / unit)
        return within(width, height) if taken > most else taken

    return ImageRule(tokens, most, merge * merge, *tower_size(vision, 3))


def dynamic_tiles(vision: ConfigReader, outer: ConfigReader, least: int, most: int) -> ImageRule:
    """The image's own grid of patches within two limits, of which 2 x 2 become a token; two around.

    The limits are those of one image. Images that together are longer than the context are made smaller.
    """
    patch, merge = integer(outer, integer(vision, 16, "patch_size"), "patch_size"), 2

    def fitted(length: int, other: int) -> int:
        rest = length % merge
        if not rest:
            return length
        return length + merge - rest if (length + merge - rest) * other <= most else max(merge, length - rest)

    def tokens(width: int, height: int) -> int:
        rows, columns = round(height / patch + 0.5), round(width / patch + 0.5)
        by = min(sqrt(most / (rows * columns)), 1.0)
        rows, columns = floor(by * rows), floor(by * columns)
        if most > least and rows * columns < least:
            by = sqrt(least / (rows * columns))
            rows, columns = ceil(by * rows), ceil(by * columns)
        rows = fitted(rows, columns)
        columns = fitted(columns, rows)
        return rows * columns // merge**2 + 2

    return ImageRule(tokens, isqrt(most // merge**2) ** 2 + 2, merge * merge, *tower_size(vision, 2, 1280, 5120))


def nemotron_h_omni(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """1,024 to 13,312 patches."""
    stated = processor(outer)
    return dynamic_tiles(
        vision, outer, integer(stated, 1024, "min_num_patches"), integer(stated, 13312, "max_num_patches")
    )
