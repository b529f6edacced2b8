"""The tokens of an image compared with Transformers' processors, which are asked for the tokens of a size.

Needs the extra `oracle`; skipped without it. The processors are made without a tokenizer, and with the sizes of the
published preprocessor_config.json where they differ from the class.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.model.towers.images import image_rule, image_tokens
from tests.oracle.test_images import SIZES, rows_and_columns

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96,
    "intermediate_size": 64,
}  # fmt: skip


def processor(name: str, kind: str, image_processor: Any, **known: Any) -> Callable[[int, int], int]:
    """The tokens of an image of a width and a height by Transformers' processor `kind`."""
    found = getattr(import_module(f"transformers.models.{name}.processing_{name}"), kind)
    made = object.__new__(found)
    made.__dict__.update(image_processor=image_processor, tokenizer=lambda text, **_: {"input_ids": [0]}, **known)
    made.__dict__["_merge_kwargs"] = lambda **_: {"images_kwargs": {}}
    return lambda width, height: int(made._get_num_multimodal_tokens(image_sizes=[(height, width)]).num_image_tokens[0])


def pil(name: str, kind: str, **known: Any) -> Any:
    return getattr(import_module(f"transformers.models.{name}.image_processing_pil_{name}"), kind)(**known)


def idefics3() -> Callable[[int, int], int]:
    own = pil(
        "idefics3", "Idefics3ImageProcessorPil", size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    )
    return processor("idefics3", "Idefics3Processor", own, image_seq_len=64)


def llava_next() -> Callable[[int, int], int]:
    known = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    own = pil("llava_next", "LlavaNextImageProcessorPil", size={"shortest_edge": 336})
    return processor("llava_next", "LlavaNextProcessor", own, **known)


def llava_onevision() -> Callable[[int, int], int]:
    own = pil("llava_onevision", "LlavaOnevisionImageProcessorPil")
    own.size = {"height": 384, "width": 384}
    known = {"num_image_tokens": 729, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    return processor("llava_onevision", "LlavaOnevisionProcessor", own, **known)


def cohere(name: str, kind: str, side: int, **known: Any) -> Callable[[int, int], int]:
    import numpy

    canvas = rows_and_columns("cohere2_vision.image_processing_cohere2_vision", "get_optimal_tiled_canvas", np=numpy)

    def patches(height: int, width: int, _: Any) -> int:
        columns, rows = canvas((height, width), (side, side), 1, 12)
        return int(columns * rows + 1 if columns * rows > 1 else 1)

    return processor(name, kind, SimpleNamespace(get_number_of_image_patches=patches), **known)


def of_pixels(name: str, kind: str) -> Callable[[int, int], int]:
    own = pil(name, kind)
    return lambda width, height: own.get_number_of_image_patches(height, width) // own.merge_size**2


def lfm2_vl() -> Callable[[int, int], int]:
    """The image processor needs torchvision, so its methods are taken from its source."""
    package = find_spec("transformers")
    assert package is not None
    path = Path(str(package.origin)).parent / "models/lfm2_vl/image_processing_lfm2_vl.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = {"round_by_factor", "find_closest_aspect_ratio", "smart_resize", "_is_image_too_large", "_get_grid_layout",
              "_target_ratios"}  # fmt: skip
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted}
    for node in found.values():
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([*found.values()], []), str(path), "exec"), names)
    own = SimpleNamespace(_target_ratios=lambda least, most: names["_target_ratios"](None, least, most))
    made: Any = object.__new__(import_module("transformers.models.lfm2_vl.processing_lfm2_vl").Lfm2VlProcessor)
    made.__dict__.update(image_token="<image>", image_start_token="<a>", image_end_token="<b>",
                         image_thumbnail_token="<c>")  # fmt: skip
    known = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}

    def tokens(width: int, height: int) -> int:
        columns = rows = 1
        if names["_is_image_too_large"](None, height, width, max_pixels_tolerance=2.0, **known):
            columns, rows, *_ = names["_get_grid_layout"](own, height, width, 2, 10, 512)
        new_width, new_height = names["smart_resize"](None, height, width, min_image_tokens=64, **known)
        whole = made._compute_tokens_for_image([new_height, new_width], 16, 2)
        return int(made._build_image_tokens(rows, columns, 256, whole, True, True).count("<"))

    return tokens


CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
LLAMA = {"text_config": {"model_type": "llama", **TEXT}}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Callable[[int, int], int]]]] = {
    "smolvlm": ({**LLAMA, "scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}}, idefics3),
    "lfm2_vl": ({"text_config": {"model_type": "lfm2", **TEXT}, "vision_config": {}}, lfm2_vl),
    "llava_next": ({**LLAMA, "vision_config": CLIP}, llava_next),
    "llava_onevision": (
        {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": SIGLIP,
         "vision_aspect_ratio": "anyres_max_9"},
        llava_onevision,
    ),
    "aya_vision": (
        {"text_config": {"model_type": "cohere2", **TEXT}, "vision_config": {**SIGLIP, "image_size": 364}},
        lambda: cohere("aya_vision", "AyaVisionProcessor", 364, img_size=364, patch_size=28),
    ),
    "cohere2_vision": (
        {"text_config": {"model_type": "cohere2", **TEXT},
         "vision_config": {**SIGLIP, "image_size": 512, "patch_size": 16}},
        lambda: cohere("cohere2_vision", "Cohere2VisionProcessor", 512, patch_size=16),
    ),
    "ernie4_5_vl_moe": (
        {"text_config": {"model_type": "ernie4_5_vl_moe_text", **TEXT}, "vision_config": {}},
        lambda: of_pixels("ernie4_5_vl_moe", "Ernie4_5_VLMoeImageProcessorPil"),
    ),
    "paddleocr_vl": (
        {"text_config": {"model_type": "paddleocr_vl_text", **TEXT}, "vision_config": {}},
        lambda: of_pixels("paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
    ),
}  # fmt: skip


def assert_tokens(
    model_type: str, config: dict[str, Any], oracle: Callable[[int, int], int], sizes: Iterable[tuple[int, int]]
) -> tuple[int, int]:
    """Images of all sizes take the tokens of `oracle`. Returns the most of these, and those of the largest image."""
    model = kvcalc.read_config({"model_type": model_type, **config}, "own", "test")
    rule, most = image_rule(model), 0
    assert rule is not None
    for width, height in sizes:
        if max(width, height) / min(width, height) > 180:
            continue
        taken = image_tokens(model, width, height)
        assert taken == oracle(width, height), (width, height)
        most = max(most, taken)
    return most, rule.most


@pytest.mark.parametrize("model_type", CASES)
def test_tokens_by_transformers_processor(model_type: str) -> None:
    config, make = CASES[model_type]
    taken, most = assert_tokens(model_type, config, make(), SIZES)
    # LLaVA-OneVision reduces a grid only if its sides are more than 1.1 times too long.
    assert taken <= most * 1.1
