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

SMALL = ("--contexts", "40:60", "--batches", "1", "--steps", "2", "--scale", "1024")
ONE_TEST = ("--tests", "tests/gpu/test_device.py::test_a_graph_repeats_the_call")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu")


def script(folder: Path, *options: str) -> tuple[int, str, str]:
    """The exit code, what was printed, and the page."""
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--out", str(folder), *SMALL, *ONE_TEST, *options],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout, (folder / "gpu.md").read_text()


def test_it_runs_to_its_end_on_a_simulated_device(tmp_path: Path) -> None:
    status, out, page = script(
        tmp_path, "--under", "tests.simulated_cuda", "--models", "gpt2,no-such-model", "--kv-dtypes", "bf16"
    )
    assert status == 1, "one case has no record"
    lines = out.splitlines()
    assert any("NVIDIA H200, 132 multiprocessors" in line for line in lines)
    # There is no driver to ask, and the rest is done all the same.
    assert any(line.startswith("clocks before: FAILED") for line in lines)
    assert any(line.startswith("a capture that fails: the allocator still works") for line in lines)
    assert any(line.startswith("pytest -m gpu: 1 passed; ") for line in lines)
    assert "no-such-model-bf16: FAILED: exit code 3: kvcalc: " in out
    assert lines[-1] == "1 of 2 cases have no record"
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert path.name.startswith("nvidia-h200_")
    assert path.name.endswith("_gpt2-bf16.json")
    assert [(run["context_tokens"], run["held_bytes"] == run["predicted_bytes"]) for run in record["runs"]] == [
        (40, True), (60, True)
    ]  # fmt: skip
    rows = [line for line in page.splitlines() if line.startswith("| gpt2 (2 layers) | bf16 |")]
    assert len(rows) == 2
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


def test_stages_that_fail_do_not_end_it(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process fails, and at last there is no time left."""
    page, clock = gpu.Page(tmp_path / "gpu.md"), gpu.Clock(100)
    fails = [sys.executable, "-c", "raise SystemExit('lost the device')"]
    gpu.look(fails, "cuda", 1, page, clock)
    gpu.test(fails, [], page, clock)
    cases: tuple[Any, ...] = (["gpt2"], ["bf16", "fp8"], "context=40", 2)
    assert gpu.measure(fails, "cuda", *cases, page, clock) == 2
    assert gpu.measure(fails, "cuda", *cases, page, gpu.Clock(0)) == 2
    text = (tmp_path / "gpu.md").read_text()
    for line in ("look: FAILED: exit code 1: lost the device", "pytest -m gpu: none ran; exit code 1: lost the device",
                 "gpt2-bf16: FAILED: exit code 1: lost the device", "gpt2-fp8: not run, no time is left"):  # fmt: skip
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


def test_wrong_bytes_are_in_the_table_and_not_saved(gpu: ModuleType, tmp_path: Path) -> None:
    row = {
        "num_layers": 2, "held_bytes": 8, "predicted_bytes": 9, "verified": {"ok": True}, "context_tokens": 40,
        "batch_size": 1, "decode_step_seconds": {"p50": 1e-3}, "attention_core_seconds": None,
        "binding_roof": {"attention_core": None}, "backend": "none", "backends": [],
    }  # fmt: skip
    assert gpu.row_of("m", "bf16", row)[0] == "m (2 layers) WRONG"
    printed = json.dumps({"runs": [row], "skipped": []})
    code = f"print({printed!r}); raise SystemExit(5)"
    page = gpu.Page(tmp_path / "gpu.md")
    assert gpu.measure([sys.executable, "-c", code], "cuda", ["m"], ["bf16"], "", 2, page, gpu.Clock(60)) == 1
    assert "m (2 layers) WRONG" in (tmp_path / "gpu.md").read_text()
    assert not [*tmp_path.glob("*.json")]


def test_the_runs_before_a_stop_are_kept(gpu: ModuleType, tmp_path: Path) -> None:
    """A sweep that hangs at its second point: the record has the first one."""
    document = {
        "runs": [{
            "num_layers": 2, "held_bytes": 8, "predicted_bytes": 8, "verified": {"ok": True}, "context_tokens": 40,
            "batch_size": 1, "decode_step_seconds": {"p50": 1e-3}, "attention_core_seconds": None,
            "binding_roof": {"attention_core": None}, "backend": "none", "backends": [],
        }], "skipped": [], "device": {"name": "Some GPU", "threads": None},
        "workload": {"tensor_parallel_size": 1}, "environment": {"taken_at": "2026-01-02T03:04:05Z"},
    }  # fmt: skip
    code = (
        "import json, pathlib, sys\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--save') + 1] + '.part').write_text({json.dumps(document)!r})\n"
        "sys.exit('kvcalc: lost the device')"
    )
    page = gpu.Page(tmp_path / "gpu.md")
    assert gpu.measure([sys.executable, "-c", code], "cuda", ["m"], ["bf16"], "", 2, page, gpu.Clock(60)) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert (
        "m-bf16: FAILED: exit code 1: kvcalc: lost the device; the runs that ended: some-gpu_2026-01-02_m-bf16.json"
        in text
    )
    assert json.loads((tmp_path / "some-gpu_2026-01-02_m-bf16.json").read_text()) == document
    assert not [*tmp_path.glob(".m-bf16*")]
