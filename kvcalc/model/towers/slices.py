"""How many tokens an image takes in MiniCPM-V and MiniCPM-o, which cut it into up to 9 slices.

Source: MiniCPM-V 4.6's and 4.7's processors of Transformers 5.23.0 (`tests/oracle/test_image_slices.py` asks them); for
the older releases get_sliced_grid and get_slice_image_placeholder of image_processing_minicpmv.py, published with
MiniCPM-o 2.6, and MiniCPMVProcessingInfo, model_executor/models/minicpmv.py, vLLM 0.33.0.
"""

from __future__ import annotations

from math import ceil, inf, log, sqrt

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import ImageRule, number_of_tiles, processor, tower_size


def _grid(width: int, height: int, most: int, resolution: int) -> tuple[int, int] | None:
    """The columns and rows of the slices, or None if the image is not larger than one slice.

    Their number is that of the image's area, or one more or less. Of equal shapes, the one with more rows is taken.
    """
    number = min(ceil(width * height / (resolution * resolution)), most)
    if number <= 1:
        return None
    best, error = (1, 1), inf
    for slices in (number - 1, number, number + 1):
        if slices == 1 or slices > most:
            continue
        for columns in range(1, slices + 1):
            if slices % columns == 0:
                off = abs(log(width / height) - log(columns / (slices // columns)))
                if off < error:
                    best, error = (columns, slices // columns), off
    return best


def _id_tokens(outer: ConfigReader, number: int) -> int:
    """`<image_id>N</image_id>`, where every digit is a token: those of the last image."""
    return 2 + len(str(number - 1)) if processor(outer).boolean("use_image_id", True) else 0


def resampled(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The image and each slice take as many tokens as the resampler has queries, and two around them."""
    version = str(outer.version("version"))
    # The tokenizers of 2.6 and 4.5 are Qwen's. How those of the other releases write a line break is not known.
    if version not in ("2.6", "4.5"):
        raise ModelError(f"the marks between the slices of MiniCPM-V {version[:20]} are not known")
    stated = processor(outer)
    each = integer(stated, integer(outer, 64, "query_num"), "image_feature_size")
    most, resolution = number_of_tiles(stated, 9, "max_slice_nums"), integer(stated, 448, "scale_resolution")
    splits = stated.boolean("slice_mode", True)

    def among(width: int, height: int, number: int) -> int:
        grid = _grid(width, height, most, resolution) if splits else None
        slices = grid[0] * grid[1] * (each + 2) + grid[1] - 1 if grid else 0
        return _id_tokens(outer, number) + each + 2 + slices

    def tokens(width: int, height: int) -> int:
        return among(width, height, 1)

    size, elements = tower_size(vision)
    patches = (resolution // side(vision, "patch_size", 14)) ** 2
    return ImageRule(tokens, tokens(448, 448 * most), patches // max(each, 1), size, elements, 1, among)


def merged(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every 16 patches become a token, or 4 if downsample_mode is 4x. Slices have the shape of their part."""
    stated = processor(outer)
    most, resolution = number_of_tiles(stated, 9, "max_slice_nums"), integer(stated, 448, "scale_resolution")
    splits = stated.boolean("slice_mode", True)
    merge = 2 if stated.word("downsample_mode") == "4x" else 4
    unit = side(vision, "patch_size", 14) * merge

    def whole(width: float, height: float, enlarges: bool) -> int:
        if width * height > resolution * resolution or enlarges:
            ratio = width / height
            height = int(resolution / sqrt(ratio))
            width = int(height * ratio)
        return max(round(width / unit), 1) * max(round(height / unit), 1)

    def among(width: int, height: int, number: int) -> int:
        grid = _grid(width, height, most, resolution) if splits else None
        taken = _id_tokens(outer, number) + 2 + whole(width, height, grid is None)
        if grid is None:
            return taken
        columns, rows = grid
        wide, high = max(round(width / columns), 1), max(round(height / rows), 1)
        return taken + columns * rows * (whole(wide, high, True) + 2) + rows - 1

    def tokens(width: int, height: int) -> int:
        return among(width, height, 1)

    return ImageRule(tokens, tokens(448, 448 * most), merge * merge, *tower_size(vision), 1, among)
