"""Presets compared with facts of published config.json files: the table of benchmarks/score/preset_facts.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.score import preset_facts
from kvcalc.model.presets import find_preset
from kvcalc.model.resolve import load_model
from tests.documents import estimate
from tests.rows import every_row

FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_facts.json").read_text())


@every_row("name", FACTS)
def test_a_preset_has_the_published_facts(name: str) -> None:
    preset = find_preset(name)
    assert preset is not None
    assert [*preset_facts.differences(preset, FACTS[name]["facts"])] == []


@pytest.mark.parametrize(("name", "parameters"), [("gemma-3-4b", 4_300_079_472), ("gemma-3-12b", 12_187_325_040)])
def test_the_language_model_and_the_tower_have_the_published_parameters(name: str, parameters: int) -> None:
    """The totals of the published safetensors files, which have 64 rows more than the tokenizer has tokens."""
    weights = estimate(load_model(name))["weights"]
    assert weights["parameters"] + sum(tower["parameters"] for tower in weights["towers"]) == parameters


def test_a_lost_fact_is_found() -> None:
    preset = find_preset("glm-4.5")
    assert preset is not None
    lost = preset._replace(config=dict(preset_facts.with_key(preset.config, "num_nextn_predict_layers", None)))
    (text,) = preset_facts.differences(lost, FACTS["glm-4.5"]["facts"])
    assert text == "num_nextn_predict_layers is 1, the preset lacks it: changes drafting layers"
    wrong = preset._replace(config=dict(preset_facts.with_key(preset.config, "num_hidden_layers", 91)))
    (text,) = preset_facts.differences(wrong, FACTS["glm-4.5"]["facts"])
    assert text.startswith("num_hidden_layers is 92, the preset has 91: changes layers, weights")


def test_a_folder_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "glm4_moe", **FACTS["glm-4.5"]["facts"], "num_hidden_layers": 5}
    (tmp_path / "zai-org--GLM-4.5.json").write_text(json.dumps(config))
    (tmp_path / "nobody--nothing.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["preset_facts.py", str(tmp_path)])
        assert preset_facts.main() == 1
    assert "num_hidden_layers is 5, the preset has 92" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("glm-4.5", 1),
        ("glm-4.5-air", 1),
        ("glm-4.7-flash", 1),
        ("mimo-7b", 1),
        ("nemotron-3-super-120b-a12b", 1),
        ("nemotron-3-ultra-550b-a55b", 1),
        ("minimax-m2.5", 3),
        ("minimax-m2.7", 3),
        ("minimax-m3", 1),
        ("qwen3-next-80b-a3b", 1),  # by the family: the published config does not state it
    ],
)
def test_presets_know_the_layers_that_draft(name: str, layers: int) -> None:
    assert load_model(name).num_draft_layers == layers
