"""How many tokens an image takes in models that fit it into one of several grids: LLaVA-NeXT, Idefics 3, Cohere, LFM2.

Source: the processors of Transformers 5.23.0 (`tests/oracle/test_image_grids.py` asks them).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, sqrt

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, patches_of_side, side
from kvcalc.model.towers.image_rule import ImageRule, closest, number_of_tiles, tile_shapes, tower_size

# The heights and widths that a config without image_grid_pinpoints means.
_GRIDS = {
    "next": [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)],
    "onevision": [(384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)],
}


def _pinpoints(outer: ConfigReader, default: list[tuple[int, int]], tile: int) -> list[tuple[int, int]]:
    """The heights and widths of image_grid_pinpoints."""
    pinpoints = outer.pairs("image_grid_pinpoints", most=10**6) or default
    if min(map(min, pinpoints)) < tile:
        raise outer.error(f"image_grid_pinpoints: a side is smaller than a tile of {tile} pixels")
    return pinpoints


def _best(points: Sequence[tuple[int, int]], width: int, height: int) -> tuple[int, int]:
    """The resolution that keeps the most of the image, then the one that wastes the least."""

    def kept(point: tuple[int, int]) -> tuple[int, int]:
        by = min(point[1] / width, point[0] / height)
        effective = min(int(width * by) * int(height * by), width * height)
        return effective, effective - point[0] * point[1]

    return max(points, key=kept)


def any_resolution(
    vision: ConfigReader, outer: ConfigReader, *, grids: str, image: int, patch: int, strategy: str, limit: int = 0
) -> ImageRule:
    """The whole image, and the same image in a grid of tiles without its padding, where a token ends each row.

    With `limit`, the patches of the grid are reduced to that many tiles (vision_aspect_ratio: anyres_max_9).
    """
    tile, patches = side(vision, "image_size", image), patches_of_side(vision, image, patch)
    points = _pinpoints(outer, _GRIDS[grids], tile)
    chosen = outer.word("vision_feature_select_strategy") or strategy
    # CLIP's class token is one more if all features are taken. SigLIP has none.
    has_class = chosen == "full" and "siglip" not in str(vision.word("model_type"))
    most_tiles = limit and _limit(outer, limit)

    def tokens(width: int, height: int) -> int:
        rows, columns = (length // tile * patches for length in _best(points, width, height))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if most_tiles:
            ratio = sqrt(rows * columns / (most_tiles * patches**2))
            if ratio > 1.1:
                rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + patches * patches + has_class

    return ImageRule(
        tokens, max(tokens(width, height) for height, width in points), 1, *tower_size(vision, 2, 1024, 4096)
    )


def _limit(outer: ConfigReader, default: int) -> int:
    return outer.number_in("vision_aspect_ratio", "anyres_max_", default, most=10**4)


def idefics3(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The longest side becomes four tiles, and each tile and the whole image have tokens around them.

    Published processors have tiles of the tower's image size.
    """
    tile, scale = side(vision, "image_size", 224), integer(outer, 2, "scale_factor")
    each = patches_of_side(vision, 224, 32) ** 2 // scale**2
    longest = 4 * tile

    def tokens(width: int, height: int) -> int:
        long, short = longest, int(longest / (max(width, height) / min(width, height)))
        if height > width:
            short = int(longest * (width / height))
        short = max(short + short % 2, 1)
        across, down = ceil(long / tile), ceil(short / tile)
        rows, columns = (down, across) if width >= height else (across, down)
        return each + 3 + rows * ((each + 2) * columns + 1)

    return ImageRule(tokens, tokens(longest, longest), scale * scale, *tower_size(vision, 2, 1152, 3072))


def cohere(vision: ConfigReader, outer: ConfigReader, *, image: int, patch: int) -> ImageRule:
    """1 to 12 tiles, and the whole image if there are several. A token follows each, and two are around."""
    tile, by = side(vision, "image_size", image), integer(outer, 2, "downsample_factor")
    each = (tile // (side(vision, "patch_size", patch) * by)) ** 2
    shapes = tile_shapes(1, 12)

    def tokens(width: int, height: int) -> int:
        scales = [min(x * tile / width, y * tile / height) for x, y in shapes]
        larger = [scale for scale in scales if scale >= 1]
        x, y = shapes[scales.index(min(larger) if larger else max(scales))]
        return 2 + (each + 1) * (x * y + 1 if x * y > 1 else 1)

    return ImageRule(tokens, 2 + (each + 1) * 13, by * by, *tower_size(vision))


def lfm2_vl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """64 to 256 tokens, or 2 to 10 tiles and a thumbnail for an image of more than twice that."""
    least, most = integer(outer, 64, "min_image_tokens"), integer(outer, 256, "max_image_tokens")
    fewest, tiles = number_of_tiles(outer, 2, "min_tiles"), number_of_tiles(outer, 10, "max_tiles")
    tile = integer(outer, 512, "tile_size")
    unit = integer(outer, 16, "encoder_patch_size") * integer(outer, 2, "downsample_factor")
    marks, splits = outer.boolean("use_image_special_tokens", True), outer.boolean("do_image_splitting", True)
    thumbnail = outer.boolean("use_thumbnail", True)
    each = ceil(tile / unit) ** 2
    shapes = tile_shapes(fewest, tiles)

    def whole(width: int, height: int) -> int:
        rows, columns = (max(1, round(length / unit)) for length in (height, width))
        if rows * columns > most:
            by = sqrt(height * width / (most * unit * unit))
            rows, columns = (max(1, floor(length / by / unit)) for length in (height, width))
        elif rows * columns < least:
            by = sqrt(least * unit * unit / (height * width))
            rows, columns = (ceil(length * by / unit) for length in (height, width))
        return rows * columns

    def tokens(width: int, height: int) -> int:
        alone = whole(width, height) + 2 * marks
        area = max(unit // 2, round(height / unit) * unit) * max(unit // 2, round(width / unit) * unit)
        if not splits or area <= 2 * most * unit * unit or not shapes:
            return alone
        x, y = closest(shapes, width, height, tile)
        number = x * y
        return number * (each + marks) + (whole(width, height) + marks if thumbnail else 0) + 2 * marks

    return ImageRule(tokens, tiles * (each + marks) + most + 3, 4, *tower_size(vision))
