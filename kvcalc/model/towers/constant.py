"""How many tokens an image takes in models that resize every image to one size.

Sources: the processors of Transformers 5.23.0 (`tests/oracle/test_image_crops.py` asks them); glm4v.py, openvla.py
(model_executor/models) of vLLM 0.33.0; and VLChatProcessor, published with Janus-Pro, which Transformers' Janus is.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import integer, side
from kvcalc.model.towers.image_rule import ImageRule, Make, processor, tower_size


def _rule(vision: ConfigReader, taken: int, patches: int) -> ImageRule:
    size, elements = tower_size(vision)
    return ImageRule(lambda width, height: taken, taken, max(patches // max(taken, 1), 1), size, elements)


def _chatglm(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """GLM-4V-9B: 2 x 2 patches become a token, and two are around."""
    number = integer(vision, 1120, "image_size") // integer(vision, 14, "patch_size") // 2
    return _rule(vision, number * number + 2, 4 * number * number)


def _multi_modality(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Janus: every patch of 16 pixels of an image of 384."""
    stated = vision.nested("params")
    number = integer(stated, 384, "image_size") // integer(stated, 16, "patch_size")
    return _rule(vision, number * number, number * number)


def _openvla(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every patch of 14 pixels of the first tower's image."""
    sizes = outer.integers("image_sizes", least=14, most=10**5) or [224]
    return _rule(vision, (sizes[0] // 14) ** 2, (sizes[0] // 14) ** 2)


def _queries(key: str, default: int) -> Make:
    """As many tokens as there are learned queries."""

    def make(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
        patches = (side(vision, "image_size", 224) // side(vision, "patch_size", 14)) ** 2
        return _rule(vision, integer(outer, default, key), patches)

    return make


def _aria(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """128 tokens of an image of 490 pixels, or 256 of one of 980."""
    stated = processor(outer)
    longest, splits = integer(stated, 980, "max_image_size"), stated.boolean("split_image", False)
    if splits or longest not in (490, 980):
        raise ModelError(f"{outer.name}: Aria's images are counted without split_image, of 490 or 980 pixels")
    taken = 256 if longest == 980 else 128
    return _rule(vision, taken, (longest // side(vision, "patch_size", 14)) ** 2)


def _idefics2(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """64 tokens and two around; with do_image_splitting, those of four crops as well."""
    splits = processor(outer).config.get("do_image_splitting")
    if not isinstance(splits, bool):
        raise ModelError("do_image_splitting is in preprocessor_config.json, which must be beside config.json")
    each = integer(outer.nested("perceiver_config"), 64, "resampler_n_latents")
    taken = (5 if splits else 1) * (each + 1) + 1
    return _rule(vision, taken, (side(vision, "image_size", 980) // side(vision, "patch_size", 14)) ** 2)


def _fast_vlm(vision: ConfigReader, outer: ConfigReader) -> ImageRule:
    """Every patch of 64 pixels of an image of 1,024."""
    return _rule(vision, 256, 256)


BY_MODEL: Mapping[str, Make] = {
    "aria": _aria,
    **dict.fromkeys(("blip-2", "instructblip"), _queries("num_query_tokens", 32)),
    "chatglm": _chatglm,
    "fast_vlm": _fast_vlm,
    "idefics2": _idefics2,
    "multi_modality": _multi_modality,
    "openvla": _openvla,
}
