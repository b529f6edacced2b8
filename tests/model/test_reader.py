"""Every value of a config is read by its type: whatever stands there is read, or refused by the name of its key."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.model.towers import towers_of
from kvcalc.model.towers.images import image_tokens
from tests.conftest import ROOT
from tests.model.test_state_families import V4_FLASH

MODEL = ROOT / "kvcalc" / "model"
READERS = (*sorted((MODEL / "families").glob("*.py")), *sorted((MODEL / "towers").glob("*.py")), MODEL / "experts.py")
NAN = float("nan")
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip


def unchecked_values(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The lines that look into the mapping of a ConfigReader, or convert a value without checking its type."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            parts = [node.value]
        elif isinstance(node, ast.Compare):
            parts = [*node.comparators]
        elif isinstance(node, ast.Dict):
            parts = [value for key, value in zip(node.keys, node.values) if key is None]
        elif isinstance(node, (ast.For, ast.comprehension)):
            parts = [node.iter]
        if any(isinstance(part, ast.Attribute) and part.attr == "config" for part in parts):
            yield getattr(node, "lineno", 0), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "float"):
            parts = [value for value in node.args if isinstance(value, (ast.Name, ast.Subscript, ast.Attribute))]
            yield from ((node.lineno, ast.unparse(node)) for _ in parts)


# An inner width that was checked to be a whole number.
CHECKED = {("layer_functions.py", "int(inner)")}


@pytest.mark.parametrize("path", READERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_readers_of_configs_look_at_no_value_themselves(path: Path) -> None:
    found = unchecked_values(ast.parse(path.read_text()))
    assert [one for one in found if (path.name, one[1]) not in CHECKED] == []


@pytest.mark.parametrize(
    "code",
    [
        "x = config.config.get('size')",
        "x = config.config['size']",
        "x = 'size' in config.config",
        "x = {**config.config}",
        "x = [k for k in config.config]",
        "x = int(sizes[0])",
        "x = float(size)",
    ],
)
def test_such_a_look_is_found(code: str) -> None:
    assert [*unchecked_values(ast.parse(code))]


@pytest.mark.parametrize(
    ("model_type", "modality", "tower", "message"),
    [
        ("ovis2", "vision", {"patch_size": 0}, "patch_size is 0: must be at least 1"),
        ("video_llava", "vision", {"model_type": "clip_vision_model", "patch_size": [0]}, "patch_size"),
        ("ovis2", "vision", {"image_size": 8, "patch_size": 16}, "image_size is smaller than patch_size"),
        ("kimi_vl", "vision", {"merge_kernel_size": [2]}, "must be a list of two integers"),
        ("kimi_vl", "vision", {"merge_kernel_size": [""]}, "merge_kernel_size"),
        ("kimi_vl", "vision", {"merge_kernel_size": [2, [2]]}, "merge_kernel_size"),
        ("kimi_vl", "vision", {"merge_kernel_size": [NAN, NAN]}, "merge_kernel_size"),
        ("gemma4", "audio", {"model_type": "gemma4_audio", "subsampling_conv_channels": [128]}, "two integers"),
        ("gemma3n", "audio", {"model_type": "gemma3n_audio", "sscp_conv_channel_size": [128]}, "two integers"),
        ("ovis2", "vision", {"num_visual_indicator_tokens": 10**9}, "the sizes contradict each other"),
        ("florence2", "vision", {"mlp_ratio": 1e308}, "mlp_ratio is 1e\\+308: must be from"),
        ("lfm3_vl", "vision", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be at most 2,000"),
    ],
)
def test_a_damaged_tower_is_listed_with_the_reason(
    model_type: str, modality: str, tower: dict[str, Any], message: str
) -> None:
    spec = kvcalc.read_config({"model_type": "generic", **TEXT}, "test", "test")
    spec = spec._replace(multimodal={"model_type": model_type, f"{modality}_config": tower})
    (found,) = towers_of(spec)
    assert found.parameters is None
    assert re.search(message, found.reason or "")


@pytest.mark.parametrize(
    ("model_type", "vision", "processor"),
    [
        ("internvl_chat", {}, {"max_patches": 10**9}),
        ("molmo", {}, {"max_crops": 342}),
        ("llava_next", {"image_size": 1734}, {}),
        ("idefics3", {"patch_size": 0}, {}),
        ("qwen2_5_vl", {"spatial_merge_size": 0}, {}),
    ],
)
def test_a_damaged_image_processor_is_refused(
    model_type: str, vision: dict[str, Any], processor: dict[str, Any]
) -> None:
    """Shapes of a thousand million tiles took all of the memory."""
    spec = kvcalc.read_config({"model_type": "generic", **TEXT}, "test", "test")
    config = {"model_type": model_type, "vision_config": vision, "preprocessor_config": processor}
    with pytest.raises(ModelError, match=r"--images: .*(must be at|is smaller than)"):
        image_tokens(spec._replace(multimodal=config), 1000, 600)


@pytest.mark.parametrize("ratios", [[[], 0], [0, "4"], [NAN, 4], [4], "04", 4])
def test_ratios_that_are_none_are_refused(ratios: object) -> None:
    config = {**V4_FLASH, "model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": ratios}
    with pytest.raises(ModelError, match="compress_ratios"):
        kvcalc.read_config({key: value for key, value in config.items() if key != "layer_types"}, "test", "test")
