"""Records are written atomically, and do not identify the machine."""

from __future__ import annotations

import errno
import getpass
import json
import os
import socket
import stat
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvcalc.atomic_file import check_target
from kvcalc.errors import KvcalcError, RunError
from kvcalc.measure import record
from kvcalc.measure.devices import environment
from tests.conftest import ROOT
from tests.documents import validate
from tests.measure.quick import FAST

DOCUMENT: dict[str, Any] = {"schema_version": 1, "model": {}, "workload": {}, "device": {}, "roof": {}, "runs": []}

as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")


def test_a_record_is_the_json_document(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    result = kvcalc("measure", *FAST, "--json", "--save", path, "--seed", "7")
    assert result.status == 0, result.err
    assert path.read_text() == result.out
    document = record.load(str(path))
    validate(document, "measure")
    assert document["workload"]["seed"] == 7
    # The package has no suffix such as +cu130, which torch.__version__ has.
    assert document["environment"]["libraries"]["torch"] == metadata.version("torch")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~current_umask()


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_nothing_in_a_record_names_machine_user_or_folder(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert kvcalc("measure", *FAST, "--save", path).status == 0
    text = path.read_text()
    for private in (socket.gethostname(), str(tmp_path), str(ROOT), os.path.expanduser("~")):
        assert private in ("localhost", "/") or private not in text
    words = set(json.dumps(json.loads(text)).replace('"', " ").split())
    assert getpass.getuser() not in words


def test_a_record_replaces_another_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("old")
    path.chmod(0o640)
    record.save(DOCUMENT, str(path))
    assert record.load(str(path)) == DOCUMENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "there" / "real.json")
    for _ in range(2):
        record.save(DOCUMENT, str(link))
        assert link.is_symlink()
        assert record.load(str(tmp_path / "there" / "real.json")) == DOCUMENT


def test_what_is_no_file_is_written_to_as_it_is(kvcalc: Any) -> None:
    """/dev/null must still be /dev/null afterwards, even if root could replace it."""
    assert kvcalc("measure", *FAST, "--save", "/dev/null").status == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    reader, writer = os.pipe()
    with os.fdopen(reader) as file:
        record.save(DOCUMENT, f"/dev/fd/{writer}")
        os.close(writer)
        assert json.load(file) == DOCUMENT


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_device_is_one_line(kvcalc: Any) -> None:
    result = kvcalc("measure", *FAST, "--json", "--save", "/dev/full")
    assert result.status == 1
    assert result.err == "kvcalc: cannot save /dev/full: No space left on device\n"
    # The results of the run are not lost: the document is on stdout.
    assert result.json["runs"]


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_a_disk_that_fills_up_leaves_the_old_record(start: Any, tmp_path: Path, limit: int) -> None:
    """A limit on the file size stops the writing in the middle, like a full disk."""
    path = tmp_path / "record.json"
    path.write_text("old")
    before = f"""
import resource
from kvcalc.measure import record
save, (_, most) = record.save, resource.getrlimit(resource.RLIMIT_FSIZE)
def save_on_a_small_disk(*given):
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, most))
    try:
        save(*given)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
record.save = save_on_a_small_disk
"""
    found = start(tmp_path, *FAST, "--json", "--save", path, before=before).result()
    assert (found.status, found.err) == (1, f"kvcalc: cannot save {path}: File too large\n")
    assert found.json["runs"]
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
                         ids=["full", "ctrl-c"])  # fmt: skip
def test_whatever_fails_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, error: BaseException
) -> None:
    def broken(*args: object) -> None:
        raise error

    path = tmp_path / "record.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, fails, broken)
        with pytest.raises((RunError, KeyboardInterrupt)) as caught:
            record.save(DOCUMENT, str(path))
    assert isinstance(caught.value, RunError) is isinstance(error, OSError)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("record.json", "old")]


def unreachable(*args: object, **options: object) -> None:
    raise AssertionError("the run was begun")


@pytest.mark.parametrize("name", ["", "missing/record.json", "folder", "file/record.json", "n" * 300, "a\0b"])
def test_where_nothing_can_be_written_is_refused_before_the_run(
    kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr("kvcalc.measure.runner.read_roof", unreachable)
    result = kvcalc("measure", *FAST, "--save", tmp_path / name if name else "")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("kvcalc: cannot save ")
    assert len(result.err.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@as_root
def test_no_permission_is_one_line(kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcalc.measure.runner.read_roof", unreachable)
    file = tmp_path / "record.json"
    file.write_text("old")
    file.chmod(0o444)
    assert "Permission denied" in kvcalc("measure", *FAST, "--save", file).err
    file.unlink()
    tmp_path.chmod(0o555)
    try:
        result = kvcalc("measure", *FAST, "--save", file)
    finally:
        tmp_path.chmod(0o755)
    assert (result.status, result.err) == (1, f"kvcalc: cannot save {file}: Permission denied\n")


def test_no_permission_as_the_system_says_it(kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for root, who can write anywhere."""

    def denied(*args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kvcalc.measure.runner.read_roof", unreachable)
    path = tmp_path / "record.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(RunError, match="Permission denied"):
            check_target(str(path))
    path.write_text("old")
    monkeypatch.setattr(os, "access", lambda *args: False)
    result = kvcalc("measure", *FAST, "--save", path)
    assert (result.status, result.err) == (1, f"kvcalc: cannot save {path}: Permission denied\n")
    assert path.read_text() == "old"


def test_bytes_that_differ_make_no_record(kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcalc.memory.kv_cache.stored_bytes", lambda *args: 12345)
    path = tmp_path / "record.json"
    result = kvcalc("measure", *FAST, "--json", "--save", path)
    assert result.status == 5
    assert result.err.splitlines()[1] == f"  {path} was not written"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a": NaN}', "NaN is not a number"),
        ("[]", "not a record of kvcalc measure"),
        ("{}", "not a record of kvcalc measure"),
        (json.dumps({**DOCUMENT, "schema_version": 4}), "schema_version is 4, expected 3"),
        (json.dumps({**DOCUMENT, "runs": {}}), "not a record"),
        (json.dumps({**DOCUMENT, "runs": [1]}), "runs.0 is not a run"),
        (json.dumps({**DOCUMENT, "runs": [{"attention": 3}]}), "runs.0 is not a run"),
    ],
)
def test_what_is_no_record_is_refused_by_name(kvcalc: Any, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    result = kvcalc("measure", "--compare", path, path)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"kvcalc: {path}: ")
    assert message in result.err


def test_a_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\nGCC 12.2.0\n")
    assert environment._driver_version(str(file)) == "570.133.20"
    said = subprocess.CompletedProcess([], 0, "550.54.15\n550.54.15\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: said)
    assert environment._driver_version(str(tmp_path / "missing")) == "550.54.15"

    def missing(*args: object, **options: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment._driver_version(str(tmp_path / "missing")) is None


def test_an_environment_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcalc.measure.devices.ranks import Place, find_place

    assert find_place({"RANK": "x"}) == Place()
    started = {"MASTER_ADDR": "a", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_place(started) == Place(3, 4, 1, 2)
    for wrong in ({"WORLD_SIZE": "two"}, {"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"RANK": "-1"}):
        with pytest.raises(KvcalcError) as caught:
            find_place({**started, **wrong})
        assert caught.value.exit_code == 2


def test_the_runs_that_ended_are_kept_until_all_have_ended(
    kvcalc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcalc.measure import runner

    target = tmp_path / "record.json"
    kept = target.with_name("record.json.part")
    sweep = (*FAST, "--sweep", "context=16:24:32", "--save", str(target), "--json")
    real, seen = runner._run, []

    def fails_at_the_third(*arguments: Any) -> Any:
        seen.append(kept.exists())
        if len(seen) == 3:
            raise RunError("lost the device", "look at it")
        return real(*arguments)

    monkeypatch.setattr(runner, "_run", fails_at_the_third)
    result = kvcalc("measure", *sweep)
    assert (result.status, seen) == (1, [False, True, True])
    assert f"look at it; the runs before the last one are in {kept}" in result.err
    assert [run["context_tokens"] for run in record.load(str(kept))["runs"]] == [16, 24]
    assert not target.exists()
    monkeypatch.setattr(runner, "_run", real)
    assert kvcalc("measure", *sweep).status == 0
    assert not kept.exists()
    assert len(record.load(str(target))["runs"]) == 3
