"""How many tokens an image takes in models that cut it into tiles.

Source: the image processors of Transformers 5.23.0 (`tests/oracle/test_images.py` asks them).
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import ImageRule, Make, tower_size


def _internvl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """1 to 12 tiles in the shape closest to the image's, and a thumbnail if there are several; two tokens around."""
    tile = side(vision, "image_size", 448)
    patches = (tile // side(vision, "patch_size", 14)) ** 2
    each = int(patches * outer.number("downsample_ratio", 0.5) ** 2)
    most = integer(outer, 12, "max_dynamic_patch")
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if x * y <= most]

    def tokens(width: int, height: int) -> int:
        best, difference = (1, 1), float("inf")
        for x, y in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            off = abs(width / height - x / y)
            if off < difference or (off == difference and width * height > 0.5 * tile * tile * x * y):
                best, difference = (x, y), off
        tiles = best[0] * best[1]
        return 2 + each * (tiles + 1 if tiles > 1 else 1)

    size, elements = tower_size(vision, 2, 1024, 4096)
    return ImageRule(tokens, 2 + each * (most + 1), patches // max(each, 1), size, elements)


def _llama4(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Up to 16 tiles and the whole image as one more, a token after each tile, and three tokens around.

    The tiles are those that enlarge the image the least, or shrink it the least if it is larger than any. Of several,
    the fewest are taken.
    """
    tile, most = side(vision, "image_size", 448), 16
    patches = (tile // side(vision, "patch_size", 14)) ** 2
    each = int(patches * vision.number("pixel_shuffle_ratio", 0.5) ** 2)
    shapes = [(rows, number // rows) for number in range(most, 0, -1) for rows in range(1, number + 1)
              if number % rows == 0]  # fmt: skip

    def tokens(width: int, height: int) -> int:
        scales = {(rows, columns): min(rows * tile / height, columns * tile / width) for rows, columns in shapes}
        larger = [scale for scale in scales.values() if scale >= 1]
        chosen = min(larger) if larger else max(scales.values())
        tiles = min(rows * columns for (rows, columns), scale in scales.items() if scale == chosen)
        return 3 + each + (tiles * (each + 1) if tiles > 1 else 0)

    size, elements = tower_size(vision, 2, 768, 5632)
    return ImageRule(tokens, 3 + each + most * (each + 1), patches // max(each, 1), size, elements)


BY_MODEL: Mapping[str, Make] = {
    **dict.fromkeys(("internvl", "internvl_chat"), _internvl), **dict.fromkeys(("llama4", "llama4_text"), _llama4)
}  # fmt: skip
