"""How many tokens an image takes in the language model, by the rules of each family's image processor.

Source: the image processors of Transformers 5.23.0 (`tests/oracle/test_images.py` asks them), with the sizes that the
published preprocessor_config.json states where they differ from the class (Qwen).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, sqrt

from kvcalc.errors import ModelError
from kvcalc.model.memo import remembered
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import ImageRule, Make, tower_size


@remembered
def image_rule(spec: ModelSpec) -> ImageRule | None:
    """The rule for the images of a model, or None if the model has no vision tower or its rule is not known."""
    config = spec.multimodal
    if config is None:
        return None
    outer = str(config.get("model_type"))
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        config = thinker
    vision = config.get("vision_config")
    if vision is None and outer == "llava":
        from kvcalc.model.towers.named import REPOSITORIES

        vision = REPOSITORIES.get(str(config.get("mm_vision_tower")))
    if not isinstance(vision, Mapping):
        return None
    make = _BY_MODEL.get(outer) or _BY_TOWER.get(str(vision.get("model_type") or outer))
    if make is None:
        from kvcalc.model.towers.grids import BY_MODEL as GRIDS
        from kvcalc.model.towers.tiles import BY_MODEL as TILES

        make = TILES.get(outer) or GRIDS.get(outer)
    if make is None:
        return None
    try:
        return make(ConfigReader(vision, "vision_config", spec.source), ConfigReader(config, spec.name, spec.source))
    except ModelError:
        return None  # `towers_of` says what is wrong with the config


def image_tokens(spec: ModelSpec, width: int, height: int) -> int:
    """The tokens of one image. Raises ModelError (exit 3) if the model takes no images, or its rule is not known."""
    rule = image_rule(spec)
    if rule is None:
        kind = "takes no images" if spec.multimodal is None else "has images whose tokens are not known"
        raise ModelError(f"--images: {spec.name} ({spec.model_type}) {kind}")
    return rule.tokens(width, height)


def _of_pixels(least: int, most: int, patch: int, *, frames: int = 1, matrices: int = 2, video: int = 1) -> Make:
    """Both sides become multiples of a merged patch, and the area is kept between two limits.

    `frames` frames share the limits. A side is rounded to the nearest multiple, or down or up if a limit applies.
    """

    def make(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
        merge = integer(vision, 2, "spatial_merge_size")
        unit = integer(vision, patch, "patch_size") * merge

        def tokens(width: int, height: int) -> int:
            rows, columns = round(height / unit), round(width / unit)
            area = frames * rows * columns * unit * unit
            if area > most:
                by = sqrt(frames * height * width / most)
                rows, columns = (max(1, floor(length / by / unit)) for length in (height, width))
            elif area < least:
                by = sqrt(least / (frames * height * width))
                rows, columns = (ceil(length * by / unit) for length in (height, width))
            return rows * columns

        if "embed_dim" in vision.config:
            size = integer(vision, 1280, "embed_dim")
            elements = 2 * int(size * vision.number("mlp_ratio", 4))
        else:
            size, elements = tower_size(vision, matrices)
        return ImageRule(tokens, most // (frames * unit * unit), merge * merge, size, elements, video)

    return make


def _fixed(tokens: int | None = None) -> Make:
    """Every image is resized to one size. Without `tokens`, each patch of it is a token."""

    def make(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
        number = (side(vision, "image_size", 224) // side(vision, "patch_size", 14)) ** 2
        taken = integer(outer, tokens, "mm_tokens_per_image") if tokens is not None else number
        if outer.config.get("vision_feature_select_strategy") == "full":
            taken += 1
        size, elements = tower_size(vision)
        return ImageRule(lambda width, height: taken, taken, max(number // max(taken, 1), 1), size, elements)

    return make


def _gemma3n(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every image takes the same number of tokens, whatever its size. MobileNet's layers are convolutions."""
    taken = integer(outer, 256, "vision_soft_tokens_per_image")
    return ImageRule(lambda width, height: taken, taken, 1, integer(vision, 2048, "hidden_size"), 0)


def _gemma4(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
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

    size, elements = tower_size(vision, 3)
    return ImageRule(tokens, most, pool * pool, size, elements)


def _pixtral(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """The longest side is limited, and a token ends every row."""
    merge, longest = integer(outer, 2, "spatial_merge_size"), side(vision, "image_size", 1540)
    unit = side(vision, "patch_size", 14) * merge

    def tokens(width: int, height: int) -> int:
        ratio = max(width / longest, height / longest, 1)
        rows, columns = ceil(floor(height / ratio) / unit), ceil(floor(width / ratio) / unit)
        return rows * (columns + 1)

    size, elements = tower_size(vision, 3, 1024, 4096)
    return ImageRule(tokens, tokens(longest, longest), merge * merge, size, elements)


def _moonvit(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """At most 16,384 patches, then padded to whole tokens. An image is never enlarged."""
    patch, most, sides = integer(vision, 14, "patch_size"), 16384, 512
    unit = 2 * patch

    def tokens(width: int, height: int) -> int:
        number = max(1, width // patch) * max(1, height // patch)
        by = min(1.0, sqrt(most / number), sides * patch / width, sides * patch / height)
        return ceil(max(1, int(height * by)) / unit) * ceil(max(1, int(width * by)) / unit)

    size, elements = tower_size(vision)
    return ImageRule(tokens, most // 4, 4, size, elements)


# Two frames make a token, and vLLM tries up to 14 (_MAX_FRAMES_PER_VIDEO, model_executor/models/qwen2_vl.py). Its log
# of Qwen2.5-VL-7B with a context of 128,000 tokens prints 114,688 tokens, 7 times those of an image.
_QWEN2 = _of_pixels(56 * 56, 16384 * 28 * 28, 14, matrices=3, video=7)
_QWEN3 = _of_pixels(65536, 16777216, 16)
_MINIMAX = _of_pixels(4 * 28 * 28, 451584, 14)
_GLM = _of_pixels(112 * 112, 28 * 28 * 15000, 14, frames=2, matrices=3)

_BY_MODEL: Mapping[str, Make] = {
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "janus"), _fixed()),
    **dict.fromkeys(("gemma3", "gemma3_text", "shieldgemma2"), _fixed(256)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _gemma3n),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"), _MINIMAX),
    "ernie4_5_vl_moe": _of_pixels(56 * 56, 28 * 28 * 6177, 14),
    "paddleocr_vl": _of_pixels(384 * 384, 1536 * 1536, 14),
    **dict.fromkeys(("gemma4", "gemma4_text"), _gemma4),
    **dict.fromkeys(("kimi_k25", "kimi_k3"), _moonvit),
    **dict.fromkeys(("llama", "llava", "paligemma"), _fixed()),
    **dict.fromkeys(("lighton_ocr", "ministral3", "mistral3", "mistral_large4"), _pixtral),
}
_BY_TOWER: Mapping[str, Make] = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_vl_vision", "qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder",
         "qwen2_5_omni"),
        _QWEN2,
    ),
    **dict.fromkeys(("qwen3_omni_moe_vision_encoder", "qwen3_omni_moe"), _of_pixels(56 * 56, 16384 * 28 * 28, 16)),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_5", "qwen3_5_vision",
         "qwen3_5_moe", "qwen3_5_moe_vision"),
        _QWEN3,
    ),
    **dict.fromkeys(("glm4v", "glm4v_vision", "glm4v_moe", "glm4v_moe_vision", "glm46v", "glm46v_vision"), _GLM),
    "kimi_k25_vision": _moonvit,
}  # fmt: skip
