"""How many tokens an image takes in models that cut it into crops, each with a line break after its rows.

Sources: the processors of Transformers 5.23.0 (Molmo 2, Phi-4, Step 3.7; `tests/oracle/test_image_crops.py` asks
them); molmo.py, phi4mm.py (model_executor/models) and step3_vl.py (transformers_utils/processors) of vLLM 0.33.0; and
processing_phi3_v.py, published with Phi-3-vision.
"""

from __future__ import annotations

from math import ceil, inf

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import (
    ImageRule,
    closest,
    needed,
    number_of_tiles,
    processor,
    tile_shapes,
    tower_size,
)


def _fewest_enlarged(shapes: list[tuple[int, int]], width: int, height: int, window: int) -> tuple[int, int]:
    """The rows and columns of windows that hold the image with the least enlargement, or shrink it the least."""

    def scale(shape: tuple[int, int]) -> float:
        sides = zip(shape, (height, width))
        return min(number * window / length if length else inf for number, length in sides)

    if all(scale(shape) < 1 for shape in shapes):
        return max(shapes, key=scale)
    return min(shapes, key=lambda shape: scale(shape) if scale(shape) >= 1 else inf)


def molmo(vision: ConfigReader, outer: ConfigReader, *, crop: int, most: int, transposed: bool) -> ImageRule:
    """The whole image, and crops that overlap by 4 patches on each side; 2 x 2 patches become a token.

    Every row ends with a token, and both have two around. `transposed`: the published order of equal shapes.
    """
    stated = processor(outer)
    patch = side(stated, "patch_size", 14)
    number = integer(stated.nested("size"), crop, "height") // patch
    crops = number_of_tiles(stated, most, "max_crops")
    shapes = [(y, x) for x, y in tile_shapes(1, crops)] if transposed else tile_shapes(1, crops)
    if transposed:
        shapes.sort(key=lambda shape: (shape[0] * shape[1], shape[0]))
    alone = -(-number // 2)

    def tokens(width: int, height: int) -> int:
        margin, window = 8 * patch, number - 8
        rows, columns = _fewest_enlarged(shapes, width - margin, height - margin, window * patch)
        high, wide = (ceil((length * window + 8) / 2) for length in (rows, columns))
        return 4 + alone * (alone + 1) + high * (wide + 1)

    largest = max(tokens(number * patch * x, number * patch * y) for x, y in shapes)
    return ImageRule(
        tokens, largest, 4, *tower_size(vision, 2, 1024 if crop == 336 else 1152, 4096 if crop == 336 else 4304)
    )


def phi3(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """As many crops of 336 pixels as num_crops allows, and the whole image; 12 x 12 tokens each.

    A small image is enlarged. Every row of tokens ends with one, and one is between the two parts.
    """
    crops = needed(outer, "num_crops", "Phi-3-vision and Phi-3.5-vision cut an image into different numbers of crops")

    def tokens(width: int, height: int) -> int:
        long, short = max(width, height), min(width, height)
        scale = 1
        while scale * ceil(scale / (long / short)) <= crops:
            scale += 1
        across = scale - 1
        down = ceil(int(across * 336 / (long / short)) / 336)
        rows = down if width >= height else across
        return (across * down + 1) * 144 + 1 + (rows + 1) * 12

    return ImageRule(tokens, tokens(50, 8000), 4, *tower_size(vision, 2, 1024, 4096))


def phi4(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Up to 36 crops of 448 pixels without their padding, and the whole image; 16 x 16 tokens each.

    Every row of tokens ends with one, and one is between the two parts.
    """
    tile, patch = 448, 14
    most = number_of_tiles(processor(outer), 36, "dynamic_hd")
    shapes = tile_shapes(1, most)

    def tokens(width: int, height: int) -> int:
        columns, rows = ceil(width / tile), ceil(height / tile)
        if columns * rows > most:
            columns, rows = closest(shapes, width, height, tile)
        by = min(columns * tile / width, rows * tile / height)
        is_wide = columns * tile / width < rows * tile / height
        wide, high = columns * tile // patch, rows * tile // patch
        if is_wide:
            high -= (rows * tile - int(height * by)) // patch
        else:
            wide -= (columns * tile - int(width * by)) // patch
        return 256 + 1 + ceil(high / 2) * (ceil(wide / 2) + 1) + 16

    return ImageRule(tokens, tokens(tile, tile * most), 4, *tower_size(vision))


def step3(vision: ConfigReader, outer: ConfigReader, *, is_transformers: bool) -> ImageRule:
    """The whole image, and crops of up to 504 pixels for a larger or a long one. A token follows each row of crops.

    A rest of more than a fifth of a crop becomes one more. Transformers' class compares it as an integer, and takes an
    image of exactly 728 pixels for a small one.
    """
    whole, crop, longest = 728, 504, 3024

    def number(length: int, window: int) -> int:
        rest = length % window > 0.2 * window if is_transformers else length / window - length // window > 0.2
        return length // window + rest if length >= window else 1

    def tokens(width: int, height: int) -> int:
        if min(width, height) < 32 and max(width / height, height / width) > 4:
            width = height = max(width, height)
        if max(width, height) > longest:
            by = longest / max(width, height)
            width, height = int(width * by), int(height * by)
        long, short = max(width, height), min(width, height)
        if long < whole + is_transformers:
            window = short if long / short > 1.5 else 0
        else:
            window = min(short, crop) if long / short > 4 else crop
        if not window:
            return 169 + 2
        columns, rows = (number(length, window) for length in (width, height))
        return columns * rows * (81 + 2) + rows - 1 + 169 + 2

    return ImageRule(tokens, tokens(longest, longest), 16, *tower_size(vision, 2, 1792, 15360))
