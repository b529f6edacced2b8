"""What the rule of a family's images is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer
from kvcalc.records import NamedTuple


class ImageRule(NamedTuple):
    """`tokens(width, height)` is the tokens of an image in pixels. `most` is that of the largest image, and each token
    takes `patches_per_token` patches of the vision tower. `width` and `elements` are the tower's width and the values
    that a patch needs in the widest module of a layer. vLLM tries videos of up to `most_frames` times as many tokens.
    `among(width, height, number)` is the tokens of each of several images, if their number matters. An embedding has
    `rows` rows of the language model's width: with deepstack, those of deeper layers stand beside the last.
    """

    tokens: Callable[[int, int], int]
    most: int
    patches_per_token: int
    width: int
    elements: int
    most_frames: int = 1
    among: Callable[[int, int, int], int] | None = None
    rows: int = 1

    def each(self, width: int, height: int, number: int) -> int:
        """The tokens of each of `number` images of one request."""
        return self.tokens(width, height) if self.among is None else self.among(width, height, number)

    def most_at(self, context_tokens: int) -> int:
        """The tokens of the largest image or video that is no longer than the context, and at least one image."""
        return self.most * max(1, min(self.most_frames, context_tokens // max(self.most, 1)))


def tower_size(vision: ConfigReader, matrices: int = 2, width: int = 1152, inner: int = 4304) -> tuple[int, int]:
    """The tower's width, and the values of a patch in its widest module: in and out of the MLP."""
    size = integer(vision, width, "embed_dim", "hidden_size", "vt_hidden_size")
    middle = integer(vision, inner, "intermediate_size", "vt_intermediate_size")
    return size, matrices * middle


def is_second_ocr(outer: ConfigReader) -> bool:
    """Whether a config of DeepSeek's own code is that of DeepSeek-OCR 2, which has the type of DeepSeek-VL2 and OCR."""
    return any(str(name).startswith("DeepseekOCR2") for name in outer.items("architectures"))


# Published processors cut an image into up to 40 tiles. The shapes of all numbers up to this one are compared.
_MOST_TILES = 100

# The key under which `kvcalc.model.resolve` keeps the preprocessor_config.json that is beside a config.json.
PROCESSOR = "preprocessor_config"


def processor(outer: ConfigReader) -> ConfigReader:
    """The config of the image processor, empty if it is not beside the model's config."""
    return outer.nested(PROCESSOR)


def number_of_tiles(config: ConfigReader, default: int, *keys: str) -> int:
    """The number of tiles, crops or slices under one of `keys`, at most `_MOST_TILES`."""
    return integer(config, default, *keys, most=_MOST_TILES)


def needed(outer: ConfigReader, key: str, differs: str) -> int:
    """A number of tiles that only preprocessor_config.json has. `differs`: how releases of the family differ."""
    tiles = processor(outer).optional_integer(key, most=_MOST_TILES)
    if tiles is None:
        raise ModelError(f"{differs}: {key} is in preprocessor_config.json, which must be beside config.json")
    return tiles


def limits(outer: ConfigReader, least: int | None, most: int | None) -> tuple[int, int]:
    """The fewest and the most pixels that an image is resized to, by preprocessor_config.json or by default."""
    stated = processor(outer)
    within = stated.nested("size")
    least = stated.optional_integer("min_pixels") or within.optional_integer("shortest_edge", "min_pixels") or least
    most = stated.optional_integer("max_pixels") or within.optional_integer("longest_edge", "max_pixels") or most
    if least is None or most is None:
        raise ModelError(
            "the limits of an image's size are in preprocessor_config.json, which must be beside config.json"
        )
    return least, most


def tile_shapes(least: int, most: int) -> list[tuple[int, int]]:
    """The shapes of `least` to `most` tiles: columns and rows, those of fewer tiles first."""
    shapes = ((x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if x * y >= least)
    return sorted(shapes, key=lambda shape: shape[0] * shape[1])


def closest(shapes: Iterable[tuple[int, int]], width: int, height: int, tile: int) -> tuple[int, int]:
    """The shape closest to the image's. If several are equally close, a larger one counts only if the image fills half
    of its area."""
    best, difference = (1, 1), float("inf")
    for x, y in shapes:
        off = abs(width / height - x / y)
        if off < difference or (off == difference and width * height > 0.5 * tile * tile * x * y):
            best, difference = (x, y), off
    return best
