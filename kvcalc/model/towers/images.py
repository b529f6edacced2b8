"""How many tokens an image takes in the language model, by the rules of each family's image processor.

Source: the image processors of Transformers 5.23.0 (`tests/oracle/test_images.py` asks them), with the sizes that the
published preprocessor_config.json states where they differ from the class (Qwen).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor, isqrt, sqrt

from kvcalc.errors import ModelError
from kvcalc.model.memo import remembered
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.towers import WITHOUT_CONFIG, stated_tower
from kvcalc.model.towers.blocks import integer, patches, side
from kvcalc.model.towers.image_rule import PROCESSOR, ImageRule, limits, processor, tower_size
from kvcalc.model.towers.rules import rule_of

_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("mllama", "mllama_text_model"),
        "its images are read by cross-attention, and take no tokens of the context: --encoder-tokens",
    ),
    "minicpm_ocr": "its image processor may choose the size of an image by its content",
    "NVLM_D": "the tokens of the names that it gives its tiles are not known",
}


@remembered
def image_rule(spec: ModelSpec) -> ImageRule | None:
    """The rule for the images of a model, or None if the model has no vision tower or its rule is not known."""
    try:
        return _rule_of(spec)
    except ModelError:
        return None  # `image_tokens` and `towers_of` say what is wrong


def image_tokens(spec: ModelSpec, width: int, height: int, number: int = 1) -> int:
    """The tokens of each of `number` images of a request.

    Raises ModelError (exit 3) if the model takes no images, or its rule is not known.
    """
    try:
        return _rule_of(spec).each(width, height, number)
    except ModelError as error:
        raise ModelError(f"--images: {error.message}", error.hint) from None


def _rule_of(spec: ModelSpec) -> ImageRule:
    config, name = ConfigReader(spec.multimodal or {}, spec.name, spec.source), f"{spec.name} ({spec.model_type})"
    if spec.has_unknown_tower:
        raise ModelError(
            f"{name}: the vision tower is not known", "count the tokens of images with those of the prompt"
        )
    outer = config.shown("model_type")
    if config.is_object("thinker_config"):
        config = config.nested("thinker_config").with_values(config.shares({PROCESSOR: PROCESSOR}))
    key, vision = stated_tower(config, "vision")
    if spec.multimodal is None or (key is None and outer not in WITHOUT_CONFIG):
        raise ModelError(f"{name} takes no images")
    if outer in _REFUSED:
        raise ModelError(f"{name}: {_REFUSED[outer]}")
    if vision is None and outer == "openvla":
        vision = ConfigReader({}, "vision_config", spec.source)
    kind = vision.shown("model_type") if vision is not None and vision.is_set("model_type") else outer
    rule: Callable[[ConfigReader, ConfigReader], ImageRule] | None = rule_of("images", outer, kind)
    if rule is None or vision is None:
        raise ModelError(f"{name} has images whose tokens are not known")
    return rule(vision, config)


def of_pixels(
    vision: ConfigReader, outer: ConfigReader, *, patch: int, least: int | None = None, most: int | None = None,
    frames: int = 1, matrices: int = 2, video: int = 1, enlarges: str = "", ends_rows: bool = False, around: int = 0,
    deepstack: int = 0,
) -> ImageRule:  # fmt: skip
    """Both sides become multiples of a merged patch, and the area is kept between two limits.

    `frames` frames share the limits. A side is rounded to the nearest multiple, or down or up if a limit applies.
    Without limits, they must be in preprocessor_config.json. `enlarges` names the rule for an image with a side
    shorter than a merged patch. `ends_rows`: a token ends every row. `around`: tokens around the image.
    `deepstack`: layers of the tower whose output stands beside the last one's, if the config does not list them.
    """
    fewest, largest = limits(outer, least, most)
    merge = integer(vision, 2, "spatial_merge_size", "hidden_stride")
    unit = integer(vision, patch, "patch_size") * merge

    def tokens(width: int, height: int) -> int:
        if enlarges:
            width, height = _ENLARGED[enlarges](width, height, unit)
        rows, columns = round(height / unit), round(width / unit)
        area = frames * rows * columns * unit * unit
        if area > largest:
            by = sqrt(frames * height * width / largest)
            rows, columns = (max(1, floor(length / by / unit)) for length in (height, width))
        elif area < fewest:
            by = sqrt(fewest / (frames * height * width))
            rows, columns = (ceil(length * by / unit) for length in (height, width))
        return rows * (columns + ends_rows) + around

    if vision.mentions("embed_dim"):
        size = integer(vision, 1280, "embed_dim")
        elements = 2 * int(size * vision.number("mlp_ratio", 4))
    else:
        size, elements = tower_size(vision, matrices)
    side_tokens = isqrt(largest // (frames * unit * unit))
    widest = largest // (frames * unit * unit) + side_tokens * ends_rows + around
    levels = 1 + (vision.number_of("deepstack_visual_indexes", deepstack) if deepstack else 0)
    return ImageRule(tokens, widest, merge * merge, size, elements, video, rows=levels)


def _to_unit(width: int, height: int, unit: int) -> tuple[int, int]:
    """Keye: the width is rounded if the height is too short, and then the height if the width is."""
    if height < unit:
        width, height = round(width * unit / height), unit
    if width < unit:
        width, height = unit, round(height * unit / width)
    return width, height


def _to_unit_or_ratio(width: int, height: int, unit: int) -> tuple[int, int]:
    """Ovis 2.5: the shorter side becomes a merged patch; any other image is at most 200 times as long as wide."""
    if height < unit or width < unit:
        if height < width:
            return round(unit / height * width), unit
        return unit, round(unit / width * height)
    if max(width, height) / min(width, height) > 200:
        return (width, 200 * width) if height > width else (200 * height, height)
    return width, height


def _scaled_to_unit(width: int, height: int, unit: int) -> tuple[int, int]:
    """Cosmos 3 and GLM: an image with a shorter side is enlarged."""
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        return int(width * scale), int(height * scale)
    return width, height


_ENLARGED: Mapping[str, Callable[[int, int, int], tuple[int, int]]] = {
    "scaled_to_unit": _scaled_to_unit, "to_unit": _to_unit, "to_unit_or_ratio": _to_unit_or_ratio
}  # fmt: skip


def fixed(vision: ConfigReader, outer: ConfigReader, *, tokens: int | None = None) -> ImageRule:
    """Every image is resized to one size. Without `tokens`, each patch of it is a token."""
    number = patches(vision, 224, 14)[0]
    taken = integer(outer, tokens, "mm_tokens_per_image") if tokens is not None else number
    if outer.word("vision_feature_select_strategy") == "full":
        taken += 1
    return ImageRule(lambda width, height: taken, taken, max(number // max(taken, 1), 1), *tower_size(vision))


def gemma3n(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every image takes the same number of tokens, whatever its size. MobileNet's layers are convolutions."""
    taken = integer(outer, 256, "vision_soft_tokens_per_image")
    return ImageRule(lambda width, height: taken, taken, 1, integer(vision, 2048, "hidden_size"), 0)


def gemma4(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The largest image of the same shape that takes at most 280 tokens."""
    pool, patch = integer(vision, 3, "pooling_kernel_size"), integer(vision, 16, "patch_size")
    most, unit = integer(vision, 280, "default_output_length"), pool * patch

    def tokens(width: int, height: int) -> int:
        by = sqrt(most * pool * pool * patch * patch / (width * height))
        rows, columns = floor(by * height / unit), floor(by * width / unit)
        if rows == 0:
            return min(width // height, most)
        if columns == 0:
            return min(height // width, most)
        return rows * columns

    return ImageRule(tokens, most, pool * pool, *tower_size(vision, 3))


def pixtral(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The longest side is limited, and a token ends every row."""
    merge, longest = integer(outer, 2, "spatial_merge_size"), side(vision, "image_size", 1540)
    unit = side(vision, "patch_size", 14) * merge

    def tokens(width: int, height: int) -> int:
        ratio = max(width / longest, height / longest, 1)
        rows, columns = ceil(floor(height / ratio) / unit), ceil(floor(width / ratio) / unit)
        return rows * (columns + 1)

    return ImageRule(tokens, tokens(longest, longest), merge * merge, *tower_size(vision, 3, 1024, 4096))


def moonvit(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """At most 16,384 patches, then padded to whole tokens. An image is never enlarged."""
    patch, most, sides = integer(vision, 14, "patch_size"), 16384, 512
    unit = 2 * patch

    def tokens(width: int, height: int) -> int:
        number = max(1, width // patch) * max(1, height // patch)
        by = min(1.0, sqrt(most / number), sides * patch / width, sides * patch / height)
        return ceil(max(1, int(height * by)) / unit) * ceil(max(1, int(width * by)) / unit)

    return ImageRule(tokens, most // 4, 4, *tower_size(vision))


def kimi_vl(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Like Kimi K2.5's, with a limit of patches that only the processor's config states, and no limit of a side.

    Source: KimiVLProcessingInfo, model_executor/models/kimi_vl.py, vLLM 0.33.0, whose largest image has 1,024 x 1,024
    pixels. moonshotai/Kimi-VL-A3B-Instruct has 4,096 patches; Kimi-VL-A3B-Thinking-2506 has four times as many.
    """
    patch, stated = integer(vision, 14, "patch_size"), processor(outer).optional_integer("in_token_limit")
    unit, fewest = 2 * patch, 4096

    def taken(width: int, height: int, most: int) -> int:
        number = (width // patch) * (height // patch)
        if number > most:
            by = sqrt(most / number)
            width, height = int(width * by), int(height * by)
        return max(1, ceil(height / unit)) * max(1, ceil(width / unit))

    def tokens(width: int, height: int) -> int:
        if stated is None and (width // patch) * (height // patch) > fewest:
            differs = f"releases of Kimi-VL limit an image of more than {fewest:,} patches differently"
            raise ModelError(
                f"{differs}: in_token_limit is in preprocessor_config.json, which must be beside config.json"
            )
        return taken(width, height, stated or fewest)

    return ImageRule(tokens, taken(1024, 1024, stated or 16384), 4, *tower_size(vision))
