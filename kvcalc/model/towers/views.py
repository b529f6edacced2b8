"""How many tokens an image takes in models that see it as a whole and in tiles: DeepSeek-VL2, DeepSeek-OCR and Ovis.

Sources: the processors of Transformers 5.23.0 (DeepSeek-OCR 2, Unlimited-OCR, Ovis 2), which
`tests/oracle/test_image_crops.py` asks; deepseek_vl2.py, deepseek_ocr.py, unlimited_ocr.py and ovis.py
(model_executor/models) of vLLM 0.33.0. Transformers cuts several images for Unlimited-OCR, and vLLM does not.
"""

from __future__ import annotations

from math import ceil

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import (
    ImageRule,
    closest,
    is_second_ocr,
    number_of_tiles,
    processor,
    tile_shapes,
    tower_size,
)


def deepseek_vl2(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The whole image, and tiles of one of the candidate resolutions; a token ends every row, and one is between.

    Of more than two images, none is cut. DeepSeek-OCR and the code of DeepSeek-OCR 2 have the same type.
    """
    if is_second_ocr(outer):
        return ocr(vision, outer, tile=768, most=6, ends_rows=False)
    if vision.word("model_name") == "deeplip_b_l":
        return ocr(vision, outer, tile=640, most=6, ends_rows=True)
    points = outer.pairs("candidate_resolutions")
    if not points:
        raise ModelError(f"{outer.name}: candidate_resolutions must be a list of widths and heights")
    tile, by = points[0][0], integer(processor(outer), 2, "downsample_ratio")
    each = ceil(tile // side(vision, "patch_size", 14) / max(by, 1))

    def taken(columns: int, rows: int) -> int:
        return each * (each + 1) + 1 + rows * each * (columns * each + 1)

    def tokens(width: int, height: int) -> int:
        def kept(point: tuple[int, int]) -> tuple[int, int]:
            scale = min(point[0] / width, point[1] / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - point[0] * point[1]

        best = max(points, key=kept)
        return taken(best[0] // tile, best[1] // tile)

    def among(width: int, height: int, number: int) -> int:
        return tokens(width, height) if number <= 2 else taken(1, 1)

    largest = max(taken(point[0] // tile, point[1] // tile) for point in points)
    return ImageRule(tokens, largest, by * by, *tower_size(vision), 1, among)


def ocr(
    vision: ConfigReader, outer: ConfigReader, *, tile: int, most: int, ends_rows: bool, cuts_several: bool = True
) -> ImageRule:
    """The whole image in 1,024 pixels, and 2 to `most` tiles of an image that is larger than one.

    `ends_rows`: a token ends every row. `cuts_several`: several images of a request are cut into tiles, too.
    """
    shapes, one, whole = tile_shapes(2, most), tile // 64, 1024 // 64
    alone = whole * (whole + ends_rows) + 1

    def tokens(width: int, height: int) -> int:
        if width <= tile and height <= tile:
            return alone
        columns, rows = closest(shapes, width, height, tile)
        return alone + rows * one * (columns * one + ends_rows)

    def among(width: int, height: int, number: int) -> int:
        return tokens(width, height) if number == 1 or cuts_several else alone

    # vLLM's largest image is square or, if several are not cut, one column.
    largest = tokens(2 * tile, 2 * tile) if cuts_several else tokens(tile, tile * most)
    return ImageRule(tokens, largest, 16, 768, 2 * 3072, 1, among)


def ovis(vision: ConfigReader, outer: ConfigReader, *, most: int) -> ImageRule:
    """The fewest tiles of which 90 % are image without enlarging it, and the whole image; marks between and around."""
    backbone = vision.nested("backbone_config") if vision.mentions("backbone_config") else vision
    tile = side(backbone, "image_size", 448)
    stride = integer(vision, 2, "hidden_stride")
    each = (ceil(tile / side(backbone, "patch_size", 14)) // max(stride, 1)) ** 2
    shapes = tile_shapes(1, number_of_tiles(processor(outer), most, "max_patches"))

    def covered(rows: int, columns: int, width: int, height: int) -> float:
        area = 0.0
        for row in range(rows):
            high = height // rows if row < rows - 1 else height - row * (height // rows)
            for column in range(columns):
                wide = width // columns if column < columns - 1 else width - column * (width // columns)
                long, short = float(max(wide, high)), float(min(wide, high))
                if long > tile:
                    long, short = tile, short / long * tile
                area += long * short
        return area / (width * height)

    def tokens(width: int, height: int) -> int:
        ratios = {shape: covered(*shape, width, height) for shape in shapes}
        good = [shape for shape in shapes if ratios[shape] > 0.9]
        if good:
            rows, columns = min(good, key=lambda shape: (shape[0] * shape[1], -ratios[shape]))
        else:
            rows, columns = min(shapes, key=lambda shape: (-ratios[shape], shape[0] * shape[1]))
        tiles = rows * columns
        return each + 3 + (tiles * each + tiles - 1 if tiles > 1 else 0)

    return ImageRule(tokens, each + 3 + most * (each + 1) - 1, stride * stride, *tower_size(backbone, 3, 1024, 2816))
