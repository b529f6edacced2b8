"""How many tokens an image takes in models that cut it into tiles.

Source: the image processors of Transformers 5.23.0 (`tests/oracle/test_images.py` asks them), and internvl.py,
h2ovl.py, nemotron_vl.py and nano_nemotron_vl.py, transformers_utils/processors, vLLM 0.33.0.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, patches_of_side, side
from kvcalc.model.towers.image_rule import ImageRule, closest, number_of_tiles, processor, tile_shapes, tower_size
from kvcalc.model.towers.resized import dynamic_tiles


def _square(vision: ConfigReader, outer: ConfigReader, image: int, patch: int) -> tuple[int, int, int]:
    """The side of a tile, its patches, and its tokens. Published configs may force another side than the tower's."""
    tile = integer(outer, side(vision, "image_size", image), "force_image_size")
    patches = (tile // integer(outer, side(vision, "patch_size", patch), "patch_size")) ** 2
    return tile, patches, int(patches * outer.number("downsample_ratio", 0.5) ** 2)


def internvl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """1 to 12 tiles in the shape closest to the image's, and a thumbnail if there are several; two tokens around."""
    tile, patches, each = _square(vision, outer, 448, 14)
    stated = processor(outer)
    most = number_of_tiles(stated, number_of_tiles(outer, 12, "max_dynamic_patch"), "max_patches", "max_num_tiles")
    least, more = number_of_tiles(outer, 1, "min_dynamic_patch"), outer.boolean("use_thumbnail", True)
    if not outer.boolean("dynamic_image_size", True):
        least = most = 1
    shapes = tile_shapes(least, most)

    def tokens(width: int, height: int) -> int:
        x, y = closest(shapes, width, height, tile)
        return 2 + each * (x * y + more if x * y > 1 else 1)

    largest = 2 + each * (most + more if most > 1 else 1)
    return ImageRule(tokens, largest, patches // max(each, 1), *tower_size(vision, 2, 1024, 4096))


def h2ovl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """InternVL's tiles. With use_msac, a single image is cut again, into tiles of which neither side divides."""
    alone = internvl(vision, outer)
    if not outer.boolean("use_msac", False):
        return alone
    tile, _, each = _square(vision, outer, 448, 14)
    most = number_of_tiles(outer, 12, "max_dynamic_patch")

    def tokens(width: int, height: int) -> int:
        first = closest(tile_shapes(1, most), width, height, tile)
        others = [shape for shape in tile_shapes(3, most) if first[0] % shape[0] and first[1] % shape[1]]
        second = closest(others, width, height, tile)
        number = sum(x * y + (x * y > 1) for x, y in (first, second)) - 1
        return 2 + each * number

    def among(width: int, height: int, number: int) -> int:
        return tokens(width, height) if number == 1 else alone.tokens(width, height)

    return alone._replace(tokens=tokens, among=among, most=2 + each * (2 * most + 1))


def nemotron_vl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The shape closest to the image's whose tiles have at least 60 % of its area, or as much as there is."""
    tile, patches, each = _square(vision, outer, 512, 16)
    most = number_of_tiles(processor(outer), 12, "max_num_tiles")
    more = processor(outer).boolean("use_thumbnail", outer.boolean("use_thumbnail", True))

    def tokens(width: int, height: int) -> int:
        ratio, area = width / height, width * height

        def fits(shape: tuple[int, int]) -> float:
            own = shape[0] / shape[1]
            return min(shape[0] * shape[1] * tile * tile / area, 0.6) * min(own / ratio, ratio / own)

        x, y = max(tile_shapes(1, most), key=fits)
        return 2 + each * (x * y + more if x * y > 1 else 1)

    return ImageRule(tokens, 2 + each * (most + more), patches // max(each, 1), *tower_size(vision, 2, 1280, 5120))


def nemotron_h(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """InternVL's tiles of 512 pixels, or the image's own shape if the tower states limits of its patches."""
    stated = vision.nested("args")
    if stated.mentions("min_num_patches"):
        least, most = (integer(stated, 0, key) for key in ("min_num_patches", "max_num_patches"))
        return dynamic_tiles(vision, outer, least, most or 2**40)
    return internvl(vision, outer.with_defaults({"force_image_size": 512, "patch_size": 16}))


def llama4(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Up to 16 tiles and the whole image as one more, a token after each tile, and three tokens around.

    The tiles are those that enlarge the image the least, or shrink it the least if it is larger than any. If several
    do, the fewest are taken.
    """
    tile, most = side(vision, "image_size", 448), 16
    patches = patches_of_side(vision, 448, 14) ** 2
    each = int(patches * vision.number("pixel_shuffle_ratio", 0.5) ** 2)
    shapes = [(rows, number // rows) for number in range(most, 0, -1) for rows in range(1, number + 1)
              if number % rows == 0]  # fmt: skip

    def tokens(width: int, height: int) -> int:
        scales = {(rows, columns): min(rows * tile / height, columns * tile / width) for rows, columns in shapes}
        larger = [scale for scale in scales.values() if scale >= 1]
        chosen = min(larger) if larger else max(scales.values())
        tiles = min(rows * columns for (rows, columns), scale in scales.items() if scale == chosen)
        return 3 + each + (tiles * (each + 1) if tiles > 1 else 0)

    return ImageRule(tokens, 3 + each + most * (each + 1), patches // max(each, 1), *tower_size(vision, 2, 768, 5632))
