"""Every file that kvcalc writes is replaced as a whole, by one writer."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcalc.atomic_file import write_file
from kvcalc.errors import RunError
from tests.conftest import ROOT

SOURCES = sorted((ROOT / "kvcalc").rglob("*.py"))
WRITER = ROOT / "kvcalc" / "atomic_file.py"
# A setting of the kernel, which is no file, and /dev/null in the place of a closed stream.
OTHERS = ("/proc/self/clear_refs", "os.devnull")


def writes(tree: ast.AST) -> Iterator[str]:
    """The calls that write a file under a path: open with a mode, or a method that does it at once."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        text = ast.unparse(node)
        mode = [value.value for value in (*node.args[1:], *(word.value for word in node.keywords))
                if isinstance(value, ast.Constant) and isinstance(value.value, str)]  # fmt: skip
        if name in ("open", "io.open") and any(set(one) & set("wax+") and len(one) < 4 for one in mode):
            yield text
        if name.rsplit(".", 1)[-1] in ("write_text", "write_bytes", "savefig", "NamedTemporaryFile", "mkstemp"):
            yield text
        if name in ("os.replace", "os.rename", "shutil.copy", "shutil.copyfile", "shutil.move"):
            yield text
        if name == "os.open" and any(flag in text for flag in ("O_WRONLY", "O_RDWR", "O_CREAT")):
            yield text


def test_no_other_module_writes_a_file() -> None:
    for path in SOURCES:
        found = [text for text in writes(ast.parse(path.read_text())) if not any(part in text for part in OTHERS)]
        in_memory = [text for text in found if text.startswith("figure.savefig(image, ")]
        assert bool(found) is (path == WRITER) or found == in_memory, f"{path}: {found}"


@pytest.mark.parametrize(
    "code", ["open(path, 'w')", "open(path, mode='xb')", "Path(path).write_text('x')", "os.replace(a, b)"]
)
def test_such_a_call_is_found(code: str) -> None:
    assert [*writes(ast.parse(code))]


CHART = ["sweep", "llama-7b", "--context", "1k..4k", "--plot"]
REPORT = ["estimate", "llama-7b", "--report"]


@pytest.mark.parametrize(("command", "name"), [(CHART, "chart.svg"), (CHART, "chart.png"), (REPORT, "answer.html")])
@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], name: str, fails: str
) -> None:
    if name.endswith("png"):
        pytest.importorskip("matplotlib")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / name
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(f"kvcalc.atomic_file.os.{fails}", full)
        result = kvcalc(*command, path)
    assert (result.status, result.err.splitlines()[-1]) == (1, f"kvcalc: cannot save {path}: No space left on device")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(name, "old")]
    assert kvcalc(*command, path).status == 0
    assert path.read_bytes() != b"old"


def test_a_file_that_cannot_be_written_is_refused_before_a_sweep(kvcalc: Any, tmp_path: Path) -> None:
    (tmp_path / "chart.svg").mkdir()
    result = kvcalc(*CHART, tmp_path / "chart.svg")
    assert (result.status, result.out) == (1, "")
    assert "it is a folder, not a file" in result.err


def test_an_interrupted_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(b"new", str(tmp_path / "file"))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(RunError, match="the file name is empty"):
        write_file(b"new", "")
