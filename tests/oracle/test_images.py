"""The tokens of an image compared with Transformers' image processors. Needs the extra `oracle`; skipped without it."""

from __future__ import annotations

import ast
import math
import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.model.towers.images import image_rule, image_tokens

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

SIZES = [(w, h) for w in (32, 224, 640, 1000, 1920, 4096) for h in (32, 300, 1080, 2048, 6000)]
SIZES += [(random.Random(seed).randint(28, 5000), random.Random(seed + 1).randint(28, 5000)) for seed in range(60)]


@cache
def rows_and_columns(name: str, function: str, **given: Any) -> Any:
    """A function of an image processor, without the module's imports: some need torchvision."""
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "models" / f"{name.replace('.', '/')}.py"
    wanted = ("get_all_supported_aspect_ratios", "_num_image_tokens", function)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    names: dict[str, Any] = {**given, "math": math, "get_image_size": lambda image, _: image.shape[:2]}
    exec(compile(tree, str(path), "exec"), names)
    return names[function]


def qwen(width: int, height: int, factor: int, least: int, most: int) -> int:
    resize = rows_and_columns("qwen2_vl.image_processing_qwen2_vl", "smart_resize")
    rows, columns = resize(height, width, factor, least, most)
    return int(rows * columns // factor**2)


def glm(width: int, height: int) -> int:
    resize = rows_and_columns("glm4v.image_processing_glm4v", "smart_resize")
    rows, columns = resize(2, height, width, 2, 28, 112 * 112, 28 * 28 * 15000)
    return int(rows * columns // 28**2)


def gemma4(width: int, height: int) -> int:
    resize = rows_and_columns("gemma4.image_processing_gemma4", "get_aspect_ratio_preserving_size")
    rows, columns = resize(height, width, 16, 280 * 9, 3)
    return int(rows * columns // 48**2)


def kimi(width: int, height: int) -> int:
    resize = rows_and_columns("kimi_k25.image_processing_kimi_k25", "navit_resize")
    _, (rows, columns) = resize(height, width, 14, 2, 16384, 512)
    return int(rows * columns // 28**2)


def pixtral(width: int, height: int) -> int:
    import numpy

    resize = rows_and_columns("pixtral.image_processing_pixtral", "get_resize_output_image_size")
    rows, columns = resize(numpy.broadcast_to(numpy.zeros(1), (height, width, 3)), (1540, 1540), (28, 28))
    return int((columns // 28 + 1) * (rows // 28))


def llama4(width: int, height: int) -> int:
    import torch

    supported = torch.tensor(
        [(rows * 336, number // rows * 336) for number in range(16, 0, -1) for rows in range(1, number + 1)
         if number % rows == 0]
    )  # fmt: skip
    best = rows_and_columns("llama4.image_processing_llama4", "get_best_fit", torch=torch)
    rows, columns = (int(length) // 336 for length in best((height, width), supported))
    # Llama4Processor._prompt_split_image: 144 tokens and a separator for each tile, then the whole image.
    return 147 + (rows * columns * 145 if rows * columns > 1 else 0)


def internvl(width: int, height: int) -> int:
    canvas = rows_and_columns("got_ocr2.image_processing_got_ocr2", "get_optimal_tiled_canvas")
    x, y = canvas((height, width), (448, 448), 1, 12)
    return 2 + 256 * (x * y + 1 if x * y > 1 else 1)


ORACLES = {
    "qwen2.5-vl-7b": lambda w, h: qwen(w, h, 28, 56 * 56, 16384 * 28 * 28),
    "qwen3-vl-8b": lambda w, h: qwen(w, h, 32, 65536, 16777216),
    "qwen3.6-27b": lambda w, h: qwen(w, h, 32, 65536, 16777216),
    "gemma-4-31b": gemma4,
    "kimi-k2.5": kimi,
    "llama-4-scout": llama4,
    "ministral-3-3b": pixtral,
    "gemma-3-27b": lambda w, h: 256,
    "llava-1.5-7b": lambda w, h: 576,
}


@pytest.mark.parametrize("name", ORACLES)
def test_tokens_of_an_image(name: str) -> None:
    model = kvcalc.load_model(name)
    rule = image_rule(model)
    assert rule is not None
    for width, height in SIZES:
        if max(width, height) / min(width, height) > 180:
            continue
        assert image_tokens(model, width, height) == ORACLES[name](width, height), (width, height)
        # Kimi pads an image after its size is limited.
        assert image_tokens(model, width, height) <= rule.most * 1.1


INTERN = {
    "model_type": "internvl", "text_config": {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2,
                                              "num_attention_heads": 4, "num_key_value_heads": 4},
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}  # fmt: skip
GLM = {
    "model_type": "glm4v", "text_config": {"model_type": "glm4v_text", "hidden_size": 64, "num_hidden_layers": 2,
                                           "num_attention_heads": 4, "num_key_value_heads": 4},
    "vision_config": {},
}  # fmt: skip


@pytest.mark.parametrize(("config", "oracle"), [(INTERN, internvl), (GLM, glm)])
def test_tokens_of_models_that_are_no_presets(config: dict[str, Any], oracle: Any) -> None:
    model = kvcalc.read_config(config, "own", "test")
    for width, height in SIZES:
        assert image_tokens(model, width, height) == oracle(width, height), (width, height)
