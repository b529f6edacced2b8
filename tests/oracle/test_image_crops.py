"""The tokens of an image compared with Transformers' processors of models that cut images into crops or slices.

Needs the extra `oracle`; skipped without it. Some image processors need torchvision, so their methods are taken from
their source. A processor's text for an image has one mark for each of its tokens, so the marks are counted.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable
from functools import cache, lru_cache, reduce
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.model.towers.images import image_tokens
from tests.oracle.test_image_grids import TEXT, assert_tokens, of_pixels, pil, processor
from tests.oracle.test_images import SIZES

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

Counts = Callable[[int, int], int]


@cache
def functions(file: str, *names: str) -> SimpleNamespace:
    """The functions and methods called `names` in a file of transformers/models, without its imports."""
    import torch

    found = find_spec("transformers")
    assert found is not None
    path = Path(str(found.origin)).parent / "models" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in nodes:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *filter(None, (node.args.kwarg,))):
            argument.annotation = None
    assert {node.name for node in nodes} == set(names)
    known: dict[str, Any] = {
        "math": math,
        "torch": torch,
        "itertools": itertools,
        "reduce": reduce,
        "lru_cache": lru_cache,
    }
    exec(compile(ast.Module([*nodes], []), str(path), "exec"), known)
    return SimpleNamespace(**known)


def text_processor(name: str, kind: str, **known: Any) -> Any:
    """A processor without a tokenizer."""
    found = getattr(import_module(f"transformers.models.{name}.processing_{name}"), kind)
    made = object.__new__(found)
    made.__dict__.update(known)
    return made


def marks(text: str) -> int:
    return len(re.findall(r"<[^>]*>|\n", text))


def minicpm(name: str, kind: str) -> Counts:
    import numpy

    own = pil("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil")
    known = {f"{mark}_token": f"<{mark}>" for mark in ("image", "image_start", "image_end", "slice_start", "slice_end")}
    made = text_processor(name, kind, slice_mode=True, **known)

    def tokens(width: int, height: int) -> int:
        size, options = (height, width), (own.scale_resolution, own.patch_size)
        grid = own.get_sliced_grid(size, own.max_slice_nums, own.scale_resolution)
        sizes = [own.find_best_resize(size, *options, downsample_mode="16x", allow_upscale=grid is None)]
        if grid is not None:
            high, wide = own.get_refine_size(size, grid, *options, downsample_mode="16x", allow_upscale=True)
            sizes += [(high // grid[0], wide // grid[1])] * (grid[0] * grid[1])
        inputs = {
            "grids": [grid or [0, 0]],
            "num_patches_per_image": [len(sizes)],
            "target_sizes": numpy.array(sizes) // own.patch_size,
        }
        # The number of the image, and the marks around it.
        return 3 + marks(made.replace_image_token(inputs, 0, image_token_divisor=16))

    return tokens


def molmo2() -> Counts:
    file = "molmo2/image_processing_molmo2.py"
    own = functions(file, "select_tiling", "compute_crop_geometry", "get_image_grid_and_crops")
    stated = SimpleNamespace(
        max_crops=8, overlap_margins=[4, 4], patch_size=14, pooling_size=[2, 2], size={"height": 378, "width": 378}
    )
    stated.get_image_grid_and_crops = lambda *asked: own.get_image_grid_and_crops(stated, *asked)
    known = {"image_use_col_tokens": True, "use_single_crop_col_tokens": None, "use_single_crop_start_token": True}
    made = text_processor("molmo2", "Molmo2Processor", **known)

    def tokens(width: int, height: int) -> int:
        grid, _ = stated.get_image_grid_and_crops(height, width, {})
        return marks(made.replace_image_token({"image_grids": [grid]}, 0))

    return tokens


def ovis2() -> Counts:
    import torch

    module = import_module("transformers.models.ovis2.image_processing_pil_ovis2")
    made = text_processor("ovis2", "Ovis2Processor", image_seq_length=256)

    def tokens(width: int, height: int) -> int:
        columns, rows = module.get_min_tile_covering_grid((height, width), 448, 12)
        return marks(made.replace_image_token({"grids": torch.tensor([[rows, columns]])}, 0))

    return tokens


def deepseek_ocr2() -> Counts:
    own = pil("deepseek_ocr2", "DeepseekOcr2ImageProcessorPil")
    module = import_module("transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2")
    known = {"image_processor": own, "patch_size": 16, "downsample_ratio": 4, "image_token": "<image>"}
    made = text_processor("deepseek_ocr2", "DeepseekOcr2Processor", **known)

    def tokens(width: int, height: int) -> int:
        columns, rows = module.get_optimal_tiled_canvas((height, width), (768, 768), 2, 6)
        crops = columns * rows if max(width, height) > own.tile_size else 0
        return marks(made.replace_image_token({"num_local_patches": [crops]}, 0))

    return tokens


def unlimited_ocr() -> Counts:
    file = "unlimited_ocr/image_processing_unlimited_ocr.py"
    own = functions(file, "get_all_supported_aspect_ratios", "get_optimal_tiled_canvas")
    image_processor = SimpleNamespace(size={"height": 1024, "width": 1024}, tile_size=640)
    known = {"image_processor": image_processor, "patch_size": 16, "downsample_ratio": 4, "image_token": "<image>"}
    made = text_processor("unlimited_ocr", "UnlimitedOcrProcessor", **known)

    def tokens(width: int, height: int) -> int:
        grid = own.get_optimal_tiled_canvas((height, width), (640, 640), 2, 32)
        if max(width, height) <= 640:
            grid = (1, 1)
        crops = grid[0] * grid[1] if grid != (1, 1) else 0
        return marks(made.replace_image_token({"patches_grid": [grid], "num_local_patches": [crops]}, 0))

    return tokens


def step3p7() -> Counts:
    own = functions("step3p7/image_processing_step3p7.py", "_plan_patches", "_is_extreme_aspect")
    stated = SimpleNamespace(_is_extreme_aspect=own._is_extreme_aspect, max_image_size=3024)
    known = {"image_feature_placeholder": "<im_patch>" * 169, "patch_feature_placeholder": "<im_patch>" * 81}
    made = text_processor("step3p7", "Step3p7Processor", **known)

    def tokens(width: int, height: int) -> int:
        columns, rows = own._plan_patches(stated, width, height, 728, 504)[3:5]
        ends = [column == columns - 1 and row < rows - 1 for row in range(rows) for column in range(columns)]
        inputs = {"num_local_patches": [columns * rows], "patch_newline_masks": [ends]}
        return marks(made.replace_image_token(inputs, 0))

    return tokens


def phi4() -> Counts:
    """`_preprocess` itself, on images without memory of their own: what costs time is left out."""
    import torch

    file = "phi4_multimodal/image_processing_phi4_multimodal.py"
    names = ("find_closest_aspect_ratio", "dynamic_preprocess")
    own = functions(file, *names)
    own.dynamic_preprocess.__globals__["tvF"] = SimpleNamespace(
        resize=lambda image, size: image.expand(3, *size), pad=lambda image, padding, fill: image
    )
    stated = SimpleNamespace(find_closest_aspect_ratio=lambda *asked: own.find_closest_aspect_ratio(None, *asked))

    def tokens(width: int, height: int) -> int:
        image = torch.zeros(1, 1, 1).expand(3, height, width)
        _, mask = own.dynamic_preprocess(stated, SizedOnce(image), 448, 14, 32, max_num=36)
        rows, columns = (length // 32 for length in mask.shape)
        kept = mask.reshape(rows, 32, columns, 32).transpose(1, 2)[:, :, ::2, ::2].transpose(1, 2)
        kept = kept.reshape(rows * 16, columns * 16)
        return 256 + 1 + int(kept.sum()) + int(kept[:, 0].sum()) + 16

    return tokens


class SizedOnce:
    """An image that is asked for its shape and its device, and may be expanded to any size."""

    def __init__(self, image: Any) -> None:
        self.shape, self.device = image.shape, image.device

    def expand(self, *size: int) -> SizedOnce:
        return self


def hunyuan_vl() -> Counts:
    return processor(
        "hunyuan_vl", "HunYuanVLProcessor", pil("hunyuan_vl", "HunYuanVLImageProcessorPil"), cat_extra_token=True
    )


def nemotron_h_omni() -> Counts:
    import torch

    own = functions("nemotron_h_omni/image_processing_nemotron_h_omni.py", "get_patch_grid_size")
    known = {"image_start_token": "<img>", "image_end_token": "</img>", "image_token": "<image>"}
    stated = SimpleNamespace(downsample_ratio=0.5)
    made = text_processor("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3Processor", image_processor=stated, **known)

    def tokens(width: int, height: int) -> int:
        grid = own.get_patch_grid_size(height, width, 16, 2, 1024, 13312)
        return marks(made.replace_image_token({"image_grid_hw": torch.tensor([grid])}, 0))

    return tokens


def muse(name: str, kind: str) -> Counts:
    import torch

    own = functions("muse_glimmer/image_processing_muse_glimmer.py", "smart_resize")
    known = {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>", "image_token": "<|patch|>"}
    made = text_processor(name, kind, image_processor=SimpleNamespace(merge_size=2), **known)

    def tokens(width: int, height: int) -> int:
        high, wide = own.smart_resize(height, width, 28, 4096)
        grid = torch.tensor([[1, high // 14, wide // 14]])
        return marks(made.replace_image_token({"image_grid_thw": grid}, 0))

    return tokens


def qianfan() -> Counts:
    own = pil("got_ocr2", "GotOcr2ImageProcessorPil", crop_to_patches=True, min_patches=1, max_patches=12)
    return processor("qianfan_ocr", "QianfanOCRProcessor", own, image_seq_length=256)


def aria() -> Counts:
    own = pil("aria", "AriaImageProcessorPil")
    return processor("aria", "AriaProcessor", own, size_conversion={490: 128, 980: 256})


def glm_ocr() -> Counts:
    """zai-org/GLM-OCR's preprocessor_config.json."""
    own = pil("glm46v", "Glm46VImageProcessorPil", size={"shortest_edge": 12544, "longest_edge": 9633792})
    return lambda width, height: int(own.get_number_of_image_patches(height, width, {})) // own.merge_size**2


def llava_next_video() -> Counts:
    own = pil("llava_next", "LlavaNextImageProcessorPil", size={"shortest_edge": 336})
    known = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    made = text_processor("llava_next_video", "LlavaNextVideoProcessor", image_processor=own, **known)
    return lambda width, height: int(made._get_number_of_features(height, width, 336, 336)) - 1


def gemma4_unified() -> Counts:
    own = functions("gemma4_unified/image_processing_gemma4_unified.py", "get_aspect_ratio_preserving_size")

    def tokens(width: int, height: int) -> int:
        high, wide = own.get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
        return int(high * wide // 48**2)

    return tokens


def llava(patch_size: int, crop: int, **known: Any) -> Counts:
    own = SimpleNamespace(crop_size={"height": crop, "width": crop})
    return processor("llava", "LlavaProcessor", own, patch_size=patch_size, **known)


def qwen(**size: int) -> Counts:
    """Qwen2-VL's image processor with other limits."""
    own = pil("qwen2_vl", "Qwen2VLImageProcessorPil", **size)
    return lambda width, height: int(own.get_number_of_image_patches(height, width, {})) // own.merge_size**2


EXTREME = [(5, 5), (15, 27), (20, 3000), (3000, 20), (728, 728), (729, 728), (620, 100), (9000, 9000), (12000, 700)]
LIMITS = {"size": {"shortest_edge": 200704, "longest_edge": 1003520}}
QWEN = {"text_config": {"model_type": "qwen2", **TEXT}}


def of_text(name: str, **vision: Any) -> dict[str, Any]:
    return {"text_config": {"model_type": name, **TEXT}, "vision_config": vision}


CASES: dict[str, tuple[dict[str, Any], Callable[[], Counts]]] = {
    "minicpmv4_6": (of_text("qwen3_5_text"), lambda: minicpm("minicpmv4_6", "MiniCPMV4_6Processor")),
    "minicpmv4_7": (of_text("qwen3_5_text"), lambda: minicpm("minicpmv4_7", "MiniCPMV4_7Processor")),
    "molmo2": (of_text("molmo2_text"), molmo2),
    "ovis2": (of_text("qwen2", image_size=448, patch_size=14, hidden_stride=2), ovis2),
    "deepseek_ocr2": (of_text("deepseek_ocr2_text"), deepseek_ocr2),
    "unlimited_ocr": (of_text("unlimited_ocr_text"), unlimited_ocr),
    "step3p7": (of_text("step3p5"), step3p7),
    "phi4_multimodal": ({**TEXT, "vision_config": {}}, phi4),
    "hunyuan_vl": (of_text("hunyuan_vl_text"), hunyuan_vl),
    "nemotron_h_omni": (of_text("llama"), nemotron_h_omni),
    "muse_glimmer": (of_text("muse_glimmer_text"), lambda: muse("muse_glimmer", "MuseGlimmerProcessor")),
    "muse_spark": (of_text("muse_spark_text"), lambda: muse("muse_spark", "MuseSparkProcessor")),
    "glm5_next": (of_text("glm5_next_text"), lambda: of_pixels("glm5_next", "Glm5NextImageProcessorPil")),
    "glm_ocr": (of_text("glm_ocr_text"), glm_ocr),
    "cosmos3_edge": (of_text("cosmos3_edge_text"), lambda: of_pixels("cosmos3_edge", "Cosmos3EdgeImageProcessorPil")),
    "cohere_compass": (
        of_text("cohere_compass_text", patch_size=14),
        lambda: of_pixels("cohere_compass", "CohereCompassImageProcessorPil"),
    ),
    "qianfan_ocr": (of_text("qwen3", image_size=448, patch_size=14), qianfan),
    "aria": (of_text("aria_text", patch_size=14), aria),
    "dots_ocr": (of_text("qwen2", patch_size=14), lambda: qwen(min_pixels=3136, max_pixels=11289600)),
    "llava_next_video": (
        of_text("llama", model_type="clip_vision_model", image_size=336, patch_size=14), llava_next_video,
    ),
    "gemma4_unified": (of_text("gemma4_unified_text"), gemma4_unified),
    "vipllava": (
        of_text("llama", model_type="clip_vision_model", image_size=336, patch_size=14),
        lambda: llava(14, 336, num_additional_image_tokens=1, vision_feature_select_strategy="default"),
    ),
    "fast_vlm": (
        {**of_text("qwen2", model_type="timm_wrapper"), "vision_feature_select_strategy": "full"},
        lambda: llava(64, 1024, num_additional_image_tokens=0, vision_feature_select_strategy="full"),
    ),
    "exaone4_5": (
        {**of_text("exaone4", model_type="exaone4_5_vision", patch_size=14), "preprocessor_config": LIMITS},
        lambda: qwen(min_pixels=200704, max_pixels=1003520),
    ),
    "qwen2_vl": (
        {**of_text("qwen2_vl_text", patch_size=14),
         "preprocessor_config": {"min_pixels": 200704, "max_pixels": 1003520}},
        lambda: qwen(min_pixels=200704, max_pixels=1003520),
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", CASES)
def test_tokens_by_transformers_processor(model_type: str) -> None:
    config, make = CASES[model_type]
    assert_tokens(model_type, config, make(), (*SIZES, *EXTREME))


def test_learned_queries_are_the_tokens_of_an_image() -> None:
    from transformers import AutoConfig

    for model_type in ("blip-2", "instructblip"):
        made = AutoConfig.for_model(model_type, num_query_tokens=40)
        model = kvcalc.read_config(made.to_dict(), "own", "test")
        assert image_tokens(model, 640, 480) == made.num_query_tokens


@pytest.mark.parametrize(("splits", "tokens"), [(False, 66), (True, 326)])
def test_idefics_2_with_and_without_crops(splits: bool, tokens: int) -> None:
    """Idefics2Processor puts 64 tokens between two marks, five times if it splits; two marks in a row are one."""
    config = {**of_text("mistral"), "preprocessor_config": {"do_image_splitting": splits}}
    model = kvcalc.read_config({"model_type": "idefics2", **config}, "own", "test")
    text = ("<fake>" + "<image>" * 64 + "<fake>") * (5 if splits else 1)
    assert image_tokens(model, 640, 480) == tokens == marks(text.replace("<fake><fake>", "<fake>"))
