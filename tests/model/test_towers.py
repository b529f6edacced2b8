"""Vision and audio towers: which are counted, and what is said about the others."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import tower_parameters, towers_of

KV = {"num_key_value_heads": 4}

# Parameters of the published checkpoints, as the Hugging Face Hub counts them.
PUBLISHED = {
    "gemma-3-27b": 27_432_406_640,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2.5-vl-7b": 8_292_166_656,
    "llama-4-scout": 108_641_793_536,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_language_model_and_its_towers_are_the_whole_checkpoint(name: str) -> None:
    model = kvcalc.load_model(name)
    weights = weights_of(model)
    assert weights is not None
    assert count_parameters(weights).total + tower_parameters(model) == PUBLISHED[name]


def test_gemma_3n_and_its_towers_are_the_whole_checkpoint() -> None:
    """MobileNet V5 is known by its name. The checkpoint also has K and V projections of the 15 layers that share."""
    model = kvcalc.load_model("gemma-3n-e4b")
    weights = weights_of(model)
    assert weights is not None
    unused = 15 * (2 * 2048 * 512 + 256)
    assert count_parameters(weights).total + tower_parameters(model) + unused == 7_849_978_192


def test_a_text_model_has_no_tower() -> None:
    assert towers_of(kvcalc.load_model("llama-3.1-8b")) == ()
    assert tower_parameters(kvcalc.load_model("gemma-3-1b")) == 0


def test_both_towers_are_named() -> None:
    found = towers_of(kvcalc.load_model("gemma-4-e2b"))
    assert [(tower.name, tower.kind) for tower in found] == [
        ("vision tower", "gemma4_vision"), ("audio tower", "gemma4_audio")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tower", "said"),
    [
        ({"vision_config": {"model_type": "dinov9"}}, "dinov9"),
        ({"vision_config": {"model_type": "qwen3_vl", "depth": "27"}}, "depth is '27'"),
        ({"mm_vision_tower": "own/tower"}, "without its dimensions"),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "vision_config": {"architecture": "resnet50"}},
            "resnet50",
        ),
        ({"audio_config": {"model_type": "unheard"}}, "unheard"),
    ],
)
def test_a_tower_without_a_rule_is_named(tower: dict[str, object], said: str) -> None:
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **KV, **tower}
    (found,) = towers_of(kvcalc.read_config(config, "own", "test"))
    assert found.parameters is None
    assert said in str(found.reason)


def test_a_rank_holds_a_share_of_the_matrices() -> None:
    (tower,) = towers_of(kvcalc.load_model("qwen2.5-vl-7b"))
    assert tower.on_rank(1) == tower.parameters
    assert tower.on_rank(4) == -(-(tower.split_parameters or 0) // 4) + (tower.whole_parameters or 0)
