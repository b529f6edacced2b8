"""Towers of models that are published with their own code, compared with vLLM's classes and with whole checkpoints.

A row of tower_parameters.jsonl has a small config, the classes that were built from it, and their parameters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import tower_parameters, towers_of

ROWS = [json.loads(line) for line in (Path(__file__).parent / "tower_parameters.jsonl").read_text().splitlines()]
QWEN = {"num_hidden_layers": 28, "tie_word_embeddings": False}
SO400M = {
    "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip

# The published config, and the parameters of the checkpoint as the Hugging Face Hub counts them.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "openbmb/MiniCPM-V-2_6": (
        {**QWEN, "model_type": "minicpmv", "version": "2.6", "hidden_size": 3584, "intermediate_size": 18944,
         "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151666, "query_num": 64,
         "vision_config": SO400M},
        8_099_175_152,
    ),
    "rednote-hilab/dots.ocr": (
        {**QWEN, "model_type": "dots_ocr", "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
         "num_key_value_heads": 2, "vocab_size": 151936, "vision_config": {}},
        3_039_179_264,
    ),
    # Its checkpoint also has CLIP's last layer and norm, which vLLM does not load.
    "microsoft/Phi-3.5-vision-instruct": (
        {"model_type": "phi3_v", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False,
         "img_processor": {"name": "clip_vision_model", "num_img_tokens": 144}},
        4_146_621_440 - (12 * 1024 * 1024 + 13 * 1024) - 2 * 1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_towers_have_the_parameters_of_vllms_classes(row: dict[str, Any]) -> None:
    towers = {tower.name: tower for tower in towers_of(kvcalc.read_config(row["config"], "own", "test"))}
    tower = towers[row.get("tower", "vision tower")]
    assert (tower.reason, tower.parameters) == (None, row["parameters"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_language_model_and_its_tower_are_the_whole_checkpoint(name: str) -> None:
    config, parameters = PUBLISHED[name]
    model = kvcalc.read_config(config, name, "test")
    weights = weights_of(model)
    assert weights is not None
    assert count_parameters(weights).total + tower_parameters(model) == parameters


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "minicpmv", "hidden_size": 2304, "query_num": 64, "vision_config": {}}, "before 2.5"),
        ({"model_type": "ovis", "llm_config": {"model_type": "qwen2"},
          "visual_tokenizer_config": {"backbone_config": {"model_type": "dinov9"}}}, "dinov9"),
    ],
)  # fmt: skip
def test_a_tower_that_is_not_counted_is_named(config: dict[str, Any], said: str) -> None:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
            "intermediate_size": 64, "vocab_size": 96}  # fmt: skip
    inner = {"llm_config": {**text, **config["llm_config"]}} if "llm_config" in config else {}
    (tower,) = towers_of(kvcalc.read_config({**text, **config, **inner}, "own", "test"))
    assert tower.parameters is None
    assert said in str(tower.reason)
