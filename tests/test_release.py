"""The package is built the same way twice, and the built archives have what they need."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("build")
pytest.importorskip("hatchling")

_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "compiled", "dist", "*.egg-info")


def build(source: Path, out: Path, epoch: int) -> dict[str, Path]:
    """The sdist and the wheel of a copy of the checkout, whose files all have another time."""
    shutil.copytree(ROOT, source, ignore=_NOT_COPIED)
    for path in source.rglob("*"):
        os.utime(path, (epoch, epoch))
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", str(out), str(source)],
        check=True, capture_output=True, env={**os.environ, "TZ": "UTC" if epoch % 2 else "Asia/Tokyo"},
    )  # fmt: skip
    return {path.suffix: path for path in out.iterdir()}


def test_two_builds_are_identical_to_the_bit(tmp_path: Path) -> None:
    one = build(tmp_path / "one", tmp_path / "first", 1_000_000_001)
    other = build(tmp_path / "another folder", tmp_path / "second", 1_700_000_000)
    assert sorted(one) == sorted(other) == [".gz", ".whl"]
    for suffix, path in one.items():
        assert path.name == other[suffix].name
        hashes = {hashlib.sha256(built.read_bytes()).hexdigest() for built in (path, other[suffix])}
        assert len(hashes) == 1, path.name
    with zipfile.ZipFile(one[".whl"]) as wheel:
        names = set(wheel.namelist())
    assert {"kvcalc/schema.json", "kvcalc/py.typed", "kvcalc/presets/models/gpt2.yaml"} <= names
    assert "kvcalc/presets/compiled/gpt2.json" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)
    with tarfile.open(one[".gz"]) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "tests/conftest.py", "presets/models/gpt2.yaml", "SECURITY.md", "README.md"} <= files
