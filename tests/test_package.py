"""The package: consistent versions, a reason for each dependency, and the look-up of presets."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import kvcalc
from kvcalc.model import presets
from tests.conftest import ROOT, spawn

PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert version("kvcalc") == kvcalc.__version__


def test_constraints_pin_one_version_of_everything_a_test_needs() -> None:
    pinned = dict(re.findall(r"^([A-Za-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["torch"] == "2.13.0"
    wanted = re.findall(r'^    "([A-Za-z0-9-]+)>=', PYPROJECT, re.MULTILINE)
    assert {name.lower() for name in wanted} <= {name.lower() for name in pinned}


def test_dependencies_are_bounded() -> None:
    for requirement in re.findall(r'"([A-Za-z0-9-]+>=[^"]+)"', PYPROJECT.split("[project.scripts]")[0]):
        if not requirement.startswith(("torch", "types-")):
            assert "<" in requirement, requirement


def test_presets_inside_the_package_win_over_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets are inside the package in a wheel, and next to it in a checkout."""
    module = tmp_path / "kvcalc" / "model" / "presets.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(presets, "__file__", str(module))
    beside, inside = tmp_path / "presets" / "models", tmp_path / "kvcalc" / "presets" / "models"
    shutil.copytree(ROOT / "presets" / "models", beside)
    assert presets.presets_folder() == str(beside)
    assert "gpt2" in [preset.name for preset in presets.shipped_presets()]
    inside.mkdir(parents=True)
    assert presets.presets_folder() == str(inside)


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    result = spawn("estimate", "llama-3-70b", "--context", "8192", "--get", "kv_cache.total_bytes", cwd=tmp_path)
    assert (result.status, result.out) == (0, "2684354560\n")


def test_nothing_user_facing_speaks_of_this_projects_workshop() -> None:
    for path in [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "kvcalc").rglob("*.py"),
        *(ROOT / "presets").rglob("*.yaml"),
    ]:
        assert "../shared" not in path.read_text(), path
