"""The tokens of an image compared with what the engine's or the family's own code said for its size.

A row of image_tokens.jsonl has a config, the function that was run, and widths, heights and tokens: its largest side is
12,000 pixels, its smallest 16. Families whose processors are in Transformers are asked in tests/oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import ModelError
from kvcalc.model.towers.images import image_rule, image_tokens

ROWS = [json.loads(line) for line in (Path(__file__).parent / "image_tokens.jsonl").read_text().splitlines()]
NAMES = [row["name"] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_tokens_by_the_families_own_code(row: dict[str, Any]) -> None:
    model = kvcalc.read_config(row["config"], "own", "test")
    assert len(row["sizes"]) >= 80
    found = [[width, height, image_tokens(model, width, height, row["number"])] for width, height, _ in row["sizes"]]
    assert found == row["sizes"]


# vLLM tries a smaller image than the largest, or the largest of all is cut in a way that it does not try.
SMALLER = ("DeepSeek-OCR", "DeepSeek-OCR 2", "Kimi-VL with 4096 patches", "Kimi-VL with 16384 patches",
           "Nemotron Nano Omni with 13312 patches")  # fmt: skip


@pytest.mark.parametrize("row", [row for row in ROWS if row["name"] not in SMALLER], ids=lambda row: row["name"])
def test_no_image_takes_more_than_the_largest(row: dict[str, Any]) -> None:
    rule = image_rule(kvcalc.read_config(row["config"], "own", "test"))
    assert rule is not None
    assert max(tokens for _, _, tokens in row["sizes"]) <= rule.most


@pytest.mark.parametrize("name", SMALLER[:2])
def test_the_largest_image_that_vllm_tries(name: str) -> None:
    row = ROWS[NAMES.index(name)]
    rule = image_rule(kvcalc.read_config(row["config"], "own", "test"))
    assert rule is not None
    tile = 640 if name == "DeepSeek-OCR" else 768
    assert rule.most == rule.tokens(2 * tile, 2 * tile)


def config_of(name: str, **changed: Any) -> dict[str, Any]:
    return {**ROWS[NAMES.index(name)]["config"], **changed}


def test_several_images_of_deepseek_vl2_are_not_cut() -> None:
    model = kvcalc.read_config(config_of("DeepSeek-VL2"), "own", "test")
    assert image_tokens(model, 1152, 1152, 2) == 210 + 1 + 42 * 43
    assert image_tokens(model, 1152, 1152, 3) == 210 + 1 + 14 * 15


def test_the_tokens_of_an_image_id_are_those_of_its_digits() -> None:
    model = kvcalc.read_config(config_of("MiniCPM-V 2.6"), "own", "test")
    assert [image_tokens(model, 448, 448, number) for number in (1, 10, 11, 101)] == [69, 69, 70, 71]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("Kimi-VL with 4096 patches", preprocessor_config=None), "in_token_limit is in preprocessor_config"),
        (config_of("Phi-3 vision with 4 crops", preprocessor_config=None), "num_crops is in preprocessor_config.json"),
        (config_of("Keye-VL", preprocessor_config=None), "the limits of an image's size are in preprocessor_config"),
        (config_of("MiniCPM-V 2.6", version="4.0"), "MiniCPM-V 4.0 are not known"),
        (
            config_of("DeepSeek-VL2", candidate_resolutions=[[384]]),
            "candidate_resolutions is .* must be a list of pair",
        ),
        (config_of("InternVL 2", model_type="NVLM_D"), "the names that it gives its tiles"),
    ],
)
def test_what_is_not_known_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    model = kvcalc.read_config(config, "own", "test")
    with pytest.raises(ModelError, match=said):
        image_tokens(model, 3000, 3000)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        # _get_num_image_tokens, model_executor/models/openvla.py, vLLM 0.33.0: patches of 14 pixels.
        ({"model_type": "openvla", "text_config": {}, "image_sizes": [224, 224], "timm_model_ids": ["a", "b"]}, 16**2),
        ({"model_type": "openvla", "text_config": {}, "image_sizes": [384, 384], "timm_model_ids": ["a"]}, 27**2),
        # VLChatProcessor of Janus-Pro: num_image_tokens is 576.
        ({"model_type": "multi_modality", "language_config": {},
          "vision_config": {"cls": "CLIPVisionTower", "model_type": "vision", "params": {"image_size": 384}}}, 576),
    ],
)  # fmt: skip
def test_images_of_one_size(config: dict[str, Any], tokens: int) -> None:
    key = next(key for key in ("text_config", "language_config") if key in config)
    model = kvcalc.read_config({**config, key: {**config_of("Molmo"), "model_type": "llama"}}, "own", "test")
    for width, height in ((16, 16), (640, 480), (4000, 100)):
        assert image_tokens(model, width, height) == tokens


@pytest.mark.parametrize("model_type", ["internvl", "interns1"])
def test_intern_s1_has_the_tiles_of_internvl(model_type: str) -> None:
    row = ROWS[NAMES.index("InternVL 2")]
    text = {**config_of("Molmo"), "model_type": "qwen3", "head_dim": 16}
    vision = {"model_type": model_type, "image_size": [448, 448], "patch_size": [14, 14]}
    model = kvcalc.read_config({"model_type": model_type, "text_config": text, "vision_config": vision}, "own", "test")
    found = [[width, height, image_tokens(model, width, height)] for width, height, _ in row["sizes"]]
    assert found == row["sizes"]


def test_images_that_are_read_by_cross_attention_take_no_tokens() -> None:
    with pytest.raises(ModelError, match="read by cross-attention"):
        image_tokens(kvcalc.load_model("llama-3.2-11b-vision"), 640, 480)


def test_a_small_image_of_kimi_vl_is_the_same_in_all_releases() -> None:
    model = kvcalc.read_config(config_of("Kimi-VL with 4096 patches", preprocessor_config=None), "own", "test")
    assert image_tokens(model, 640, 480) == 23 * 18


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("preprocessor_config.json", {"in_token_limit": 16384}),
        ("processor_config.json", {"image_processor": {"in_token_limit": 16384}, "processor_class": "KimiVLProcessor"}),
    ],
)
def test_the_image_processors_config_is_read_beside_the_models(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    config = config_of("Kimi-VL with 4096 patches")
    del config["preprocessor_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="in_token_limit"):
        image_tokens(kvcalc.load_model(str(tmp_path)), 3000, 3000)
    (tmp_path / file).write_text(json.dumps(content))
    # 3,000 x 3,000 pixels are 214 x 214 patches of at most 16,384, padded to whole tokens.
    assert image_tokens(kvcalc.load_model(str(tmp_path)), 3000, 3000) == 65 * 65


def test_limits_of_pixels_replace_the_families_own(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_5_vl", "vision_config": {"model_type": "qwen2_5_vl", "patch_size": 14},
        "text_config": {**config_of("Molmo"), "model_type": "qwen2_5_vl_text"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert image_tokens(kvcalc.load_model(str(tmp_path)), 1920, 1080) == 69 * 39
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 1003520}))
    assert image_tokens(kvcalc.load_model(str(tmp_path)), 1920, 1080) == 47 * 26
    rule = image_rule(kvcalc.load_model(str(tmp_path)))
    assert rule is not None
    assert rule.most == 1280


def test_a_text_models_other_files_are_not_read(tmp_path: Path) -> None:
    config = {**config_of("Molmo"), "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text("no JSON")
    with pytest.raises(ModelError, match="takes no images"):
        image_tokens(kvcalc.load_model(str(tmp_path)), 640, 480)
