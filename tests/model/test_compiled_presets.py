"""The JSON copies a build makes of the shipped presets: read where they say the same, and nowhere else."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from kvcalc.model.compiled_presets import compiled_mapping
from kvcalc.model.files import read_text
from kvcalc.model.preset_folders import shipped_files
from kvcalc.model.presets import MAX_PRESET_BYTES, presets_folder
from kvcalc.model.yaml_mapping import parse_mapping

TEXT = "name: a\ndate: 2024-04-18\n"


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    for folder in ("models", "compiled"):
        (tmp_path / folder).mkdir()
    copy = {"text": TEXT, "mapping": {"name": "a", "date": "2024-04-18"}}
    (tmp_path / "compiled" / "a.json").write_text(json.dumps(copy))
    return tmp_path / "models" / "a.yaml"


def test_a_copy_of_the_same_text_is_read(preset: Path) -> None:
    assert compiled_mapping(str(preset), TEXT) == parse_mapping(TEXT, "a")
    assert compiled_mapping(str(preset), TEXT) == {"name": "a", "date": datetime.date(2024, 4, 18)}


@pytest.mark.parametrize("copy", ["", "[]", "{", "{}", '{"text": "name: a"}', json.dumps({"text": TEXT, "mapping": 3})])
def test_a_copy_that_is_damaged_is_left_alone(preset: Path, copy: str) -> None:
    (preset.parent.parent / "compiled" / "a.json").write_text(copy)
    assert compiled_mapping(str(preset), TEXT) is None


def test_a_copy_of_another_text_is_left_alone(preset: Path) -> None:
    assert compiled_mapping(str(preset), TEXT + "note: changed since\n") is None
    assert compiled_mapping(str(preset.with_name("b.yaml")), TEXT) is None


def test_every_copy_says_what_its_preset_says() -> None:
    files = shipped_files(presets_folder())
    if not Path(presets_folder()).with_name("compiled").is_dir():
        pytest.skip("kvcalc runs from a checkout that was never installed")
    for name, path in files:
        text = read_text(path, MAX_PRESET_BYTES)
        copy = compiled_mapping(path, text)
        assert copy is None or copy == parse_mapping(text, name), name
