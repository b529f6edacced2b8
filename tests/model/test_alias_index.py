"""The list of names that the build writes: used for the files that it was made of, and for no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcalc.model.presets import Alias, compiled_aliases, names_of, presets_folder, shipped_aliases, shipped_presets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("models", "compiled"):
        (tmp_path / name).mkdir()
    (tmp_path / "models" / "a.yaml").write_text("name: a\n")
    listed = {"sizes": {"a.yaml": 8}, "names": {"a": "a", "Org/A": "a"}}
    (tmp_path / "compiled" / "_names.json").write_text(json.dumps(listed))
    return tmp_path / "models"


def test_names_are_found_in_lower_case(folder: Path) -> None:
    assert compiled_aliases(str(folder)) == {"a": Alias("a", "a"), "org/a": Alias("Org/A", "a")}


def test_a_list_of_other_files_is_not_used(folder: Path) -> None:
    (folder / "a.yaml").write_text("name: a\naliases: [Org/B]\n")
    assert compiled_aliases(str(folder)) is None


def test_a_list_without_a_new_file_is_not_used(folder: Path) -> None:
    (folder / "b.yaml").write_text("name: b\n")
    assert compiled_aliases(str(folder)) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sizes": {"a.yaml": 8}}', '{"sizes": {"a.yaml": 8}, "names": []}'])
def test_a_damaged_list_is_not_used(folder: Path, text: str) -> None:
    folder.with_name("compiled").joinpath("_names.json").write_text(text)
    assert compiled_aliases(str(folder)) is None


def test_no_folder_has_no_list(tmp_path: Path) -> None:
    assert compiled_aliases(str(tmp_path / "models")) is None


def test_the_list_has_every_name_of_every_preset() -> None:
    if compiled_aliases(presets_folder()) is None:
        pytest.skip("kvcalc runs from a checkout that was never installed, or was changed since")
    assert {(name, alias.preset) for name, alias in shipped_aliases().items()} == {
        (name, preset.name) for preset in shipped_presets() for name in names_of(preset)
    }
