"""benchmarks/gpu.py runs to its end on a simulated device, and survives what fails."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("torch")

SMALL = ("--scale", "1024")
PROFILE = ("--", "gpt2", "--context", "40,60", "--batch", "1", "--kv-dtype", "auto")
ONE_TEST = ("--tests", "tests/gpu/test_device.py::test_a_graph_repeats_the_call")


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("benchmarks.gpu")


def script(folder: Path, *options: str) -> tuple[int, str, str]:
    """The exit code, what was printed, and the page."""
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--out", str(folder), *SMALL, *ONE_TEST, *options, *PROFILE],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout, (folder / "gpu.md").read_text()


def test_it_runs_to_its_end_on_a_simulated_device(tmp_path: Path) -> None:
    status, out, page = script(tmp_path, "--under", "tests.simulated_cuda")
    assert status == 0, out
    lines = out.splitlines()
    assert any("NVIDIA H200, 132 multiprocessors" in line for line in lines)
    # There is no driver to ask, and the rest is done all the same.
    assert any(line.startswith("clocks before: FAILED") for line in lines)
    assert any(line.startswith("a capture that fails: the allocator still works") for line in lines)
    assert any(line.startswith("pytest -m gpu") and ": 1 passed; " in line for line in lines)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert path.name.startswith("nvidia-h200_")
    assert path.name.endswith("_profile.json")
    assert lines[-1].endswith(f"2 points in {path.name}")
    (record,) = document["records"]
    assert [(run["context_tokens"], run["held_bytes"] == run["predicted_bytes"]) for run in record["runs"]] == [
        (40, True), (60, True)
    ]  # fmt: skip
    assert all(line in page for line in lines)


def test_a_run_that_hangs_is_stopped(gpu: ModuleType) -> None:
    code = (
        "import subprocess, sys, time; print('begun', flush=True); subprocess.Popen(['sleep', '600']); time.sleep(600)"
    )
    ended = gpu.run([sys.executable, "-c", code], 2)
    assert ended.status is None
    assert ended.reason.startswith("stopped after ")
    assert ended.seconds < 60
    assert gpu.run([sys.executable, "-c", "raise SystemExit('no GPU')"], 60).reason == "exit code 1: no GPU"
    assert gpu.run([sys.executable, "-c", "import os; os.abort()"], 60).reason == "exit code -6: no message"


def test_stages_that_fail_do_not_end_it(gpu: ModuleType, tmp_path: Path) -> None:
    """Every process fails, and at last there is no time left."""
    page, clock = gpu.Page(tmp_path / "gpu.md"), gpu.Clock(100)
    fails = [sys.executable, "-c", "raise SystemExit('lost the device')"]
    gpu.look(fails, "cuda", 1, page, clock)
    gpu.test(fails, ["tests/gpu"], 0, page, clock)
    assert not gpu.profile(fails, [], page, clock)
    assert not gpu.profile(fails, [], page, gpu.Clock(0))
    text = (tmp_path / "gpu.md").read_text()
    for line in ("look: FAILED: exit code 1: lost the device",
                 "pytest -m gpu tests/gpu: none ran; exit code 1: lost the device",
                 "profile: FAILED: exit code 1: lost the device", "profile: not run, no time is left"):  # fmt: skip
        assert line in text


def test_what_ended_is_known_although_the_rest_was_stopped(gpu: ModuleType) -> None:
    out = """\
============================= test session starts ==============================
tests/gpu/test_a.py::test_b PASSED       [ 10%]
tests/gpu/test_a.py::test_c[--block-size 16] gpu: GQA flash: 12 us
gpu: GQA flex: 20 us
FAILED                                   [ 20%]
tests/gpu/test_a.py::test_d SKIPPED (no) [ 30%]
tests/gpu/test_a.py::test_e """
    expected = [("test_b", "PASSED"), ("test_c[--block-size 16]", "FAILED"), ("test_d", "SKIPPED")]
    assert [*gpu.outcomes(out)] == [(f"tests/gpu/test_a.py::{name}", outcome) for name, outcome in expected]
    summary = "\n= FAILURES =\nFAILED tests/gpu/test_a.py::test_c[--block-size 16] - assert\n"
    assert len([*gpu.outcomes(out + "PASSED" + summary)]) == 4
    workers = (
        "[gw1] [  6%] PASSED tests/gpu/test_a.py::test_b \n[gw0] [100%] FAILED tests/gpu/test_a.py::test_c[a b] \n"
    )
    assert [*gpu.outcomes(workers)] == [
        ("tests/gpu/test_a.py::test_b", "PASSED"), ("tests/gpu/test_a.py::test_c[a b]", "FAILED")
    ]  # fmt: skip


RUN = {"held_bytes": 8, "predicted_bytes": 8, "verified": {"ok": True}}


def profiling(gpu: ModuleType, folder: Path, run: dict[str, Any], end: str) -> tuple[bool, str, list[Path]]:
    """Profile with a process that saves one run and ends with `end`: the result, the page and the saved files."""
    document = {
        "records": [{"runs": [run]}], "points": [{}], "device": {"name": "Some GPU", "threads": None},
        "environment": {"taken_at": "2026-01-02T03:04:05Z"},
    }  # fmt: skip
    code = (
        "import pathlib, sys\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--save') + 1]).write_text({json.dumps(document)!r})\n"
        f"sys.exit({end!r})"
    )
    page = gpu.Page(folder / "gpu.md")
    is_done = gpu.profile([sys.executable, "-c", code], [], page, gpu.Clock(60))
    return is_done, (folder / "gpu.md").read_text(), [*folder.glob("*.json")]


def test_wrong_bytes_are_said_and_not_saved(gpu: ModuleType, tmp_path: Path) -> None:
    is_done, page, saved = profiling(gpu, tmp_path, {**RUN, "held_bytes": 9}, "")
    assert not is_done
    assert "profile: WRONG: 1 runs have other bytes than predicted" in page
    assert not saved


def test_the_points_before_a_stop_are_kept(gpu: ModuleType, tmp_path: Path) -> None:
    is_done, page, saved = profiling(gpu, tmp_path, RUN, "kvcalc: lost the device")
    assert not is_done
    name = "some-gpu_2026-01-02_profile.json"
    assert f"FAILED: exit code 1: kvcalc: lost the device; the points that ended: 1 points in {name}" in page
    assert [path.name for path in saved] == [name]
    assert not [*tmp_path.glob(".profile*")]
