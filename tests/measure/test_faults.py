"""Failures during a run: one-line errors, the right exit code, memory freed, and no partly written record."""

from __future__ import annotations

import gc
import json
import signal
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.attention.cache import TokenCache
from kvcalc.errors import KvcalcError, RunError
from kvcalc.measure import run, runner
from kvcalc.measure.devices import faults
from tests.measure.processes import wait_for
from tests.measure.quick import FAST, narrow

CPU_FULL = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_FULL = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
CUDA_LOST = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported\nCompile with"


def fail_in_decode(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[Any]:
    """Raise `error` in the first decode step, when weights and caches exist. Returns weak references to the caches."""
    seen: list[Any] = []

    def broken(stack: Any, *rest: Any) -> None:
        seen.extend(weakref.ref(cache) for cache in stack.caches)
        seen.extend(weakref.ref(parameter) for layer in stack.layers for parameter in layer.parameters())
        scores = torch.zeros(1000)
        assert scores.numel()
        seen.append(weakref.ref(scores))
        raise error

    monkeypatch.setattr(run, "time_decode", broken)
    return seen


FAULTS = {
    "cpu memory": (RuntimeError(CPU_FULL), "out of memory: cannot allocate 4.00 GiB more", "--layers"),
    "cuda memory": (torch.OutOfMemoryError(CUDA_FULL), "out of memory: cannot allocate 20.50 GiB more", "--layers"),
    "python's memory": (MemoryError(), "out of memory", "--layers"),
    "cublas memory": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out of memory", "--layers"
    ),
    "lost device": (
        RuntimeError(CUDA_LOST), "the device failed: CUDA error: unspecified launch failure", "driver's log"
    ),
    "lost rank": (
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited"), "lost another rank", "own error"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_torch_raises_is_one_line_and_status_1(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    error, line, hint = FAULTS[name]
    fail_in_decode(monkeypatch, error)
    result = kvcalc("measure", *FAST, "--json")
    assert (result.status, result.out) == (1, "")
    first, second = result.err.splitlines()
    assert first.startswith(f"kvcalc: {line}")
    assert hint in second


def test_a_device_lost_in_any_words(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_decode(monkeypatch, torch.AcceleratorError("xid 79: fallen off the bus"))
    result = kvcalc("measure", *FAST)
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("kvcalc: the device failed: xid 79: fallen off the bus\n")


def test_a_lost_device_that_cannot_even_free_its_memory(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError(CUDA_LOST)

    fail_in_decode(monkeypatch, RuntimeError(CUDA_LOST))
    monkeypatch.setattr(faults, "release", lost)
    result = kvcalc("measure", *FAST)
    assert result.status == 1
    assert result.err.startswith("kvcalc: the device failed: ")


def test_any_other_error_stays_what_it_is(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_decode(monkeypatch, RuntimeError("shapes (2) and (3) differ"))
    result = kvcalc("measure", *FAST)
    assert result.status == 1
    assert result.err.startswith("kvcalc: internal error: RuntimeError: shapes (2) and (3) differ\n")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(CUDA_FULL), RuntimeError("a bug"), KeyboardInterrupt(), RunError("known")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_memory_is_free_while_the_error_is_still_held(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """An error keeps its frames, and frames keep their locals. Without care, the weights live as long as the error."""
    seen = fail_in_decode(monkeypatch, error)
    caught: BaseException | None = None
    try:
        runner.measure(narrow(library.load_model("gpt2")), context_tokens=16, steps=2, num_layers=2, device="cpu")
    except BaseException as raised:
        caught = raised
    assert caught is not None
    assert len(seen) > 4
    gc.collect()
    assert not [reference() for reference in seen if reference() is not None]
    # With KVCALC_DEBUG=1 the traceback can still be printed.
    assert "in broken" in "".join(traceback.format_exception(caught))


def test_a_run_after_a_fault_is_as_good_as_any(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_in_decode(patch, torch.OutOfMemoryError(CUDA_FULL))
        assert kvcalc("measure", *FAST).status == 1
    assert kvcalc("measure", *FAST).status == 0


def test_real_memory_that_runs_out(start: Any, tmp_path: Path) -> None:
    """The check before the run sees enough memory, but an allocation fails during the run."""
    before = """
import psutil, resource
runner.free_bytes = lambda device: 1 << 50
limit = psutil.Process().memory_info().vms + (600 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
    found = start(
        tmp_path,
        "llama-7b",
        # Its weights are a fifth of the limit, and K is larger than what is left. So threads can still start.
        "--layers",
        1,
        "--context",
        "64k",
        "--device",
        "cpu",
        "--save",
        "record.json",
        before=before,
    ).result()
    assert (found.status, found.out) == (1, ""), found.err
    assert found.err.startswith("kvcalc: out of memory")
    assert len(found.err.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_nan_in_the_decode_is_no_result(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = TokenCache.append

    def spoilt(self: TokenCache, rows: Any) -> None:
        if self.length == 38:
            rows = tuple(torch.full_like(row, float("nan")) for row in rows)
        real(self, rows)

    monkeypatch.setattr(TokenCache, "append", spoilt)
    result = kvcalc("measure", *FAST, "--json", "--save", tmp_path / "record.json")
    assert (result.status, result.out) == (1, "")
    assert result.err == "kvcalc: decode: 64 of 64 outputs are NaN or infinite\n"
    assert not list(tmp_path.iterdir())


def test_nan_in_the_self_check_is_named(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvcalc.measure.verify.TOLERANCE", float("nan"))
    real = runner.verify
    monkeypatch.setattr(runner, "verify", lambda *a: {**real(*a), "max_abs_error": None, "tolerance": 1e-4})
    result = kvcalc("measure", *FAST, "--json", "--save", tmp_path / "record.json")
    assert result.status == 1
    assert "NaN in the output of the self-check" in result.err
    assert result.json["runs"][0]["verified"]["max_abs_error"] is None
    assert not list(tmp_path.iterdir())


def test_infinity_in_fp16_offers_bf16() -> None:
    with pytest.raises(KvcalcError, match=r"decode: 1 of 3 outputs") as caught:
        faults.check_finite(torch.tensor([1.0, float("inf"), 2.0], dtype=torch.float16), "decode")
    assert "--dtype bf16" in (caught.value.hint or "")
    faults.check_finite(torch.tensor([65504.0], dtype=torch.float16), "decode")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("'inductor' raised:\nImportError: no cc\n\nSet VERBOSE=1", "'inductor' raised: ImportError: no cc"),
        ("one\ntwo", "one"),
        ("only this:", "only this:"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_a_line_that_introduces_another_one_is_not_the_reason(text: str, line: str) -> None:
    assert faults.first_line(RuntimeError(text)) == line


def test_ctrl_c_is_one_line_130_and_no_record(start: Any, tmp_path: Path) -> None:
    before = """
real = run.prefill
def prefill(*rest):
    open("ready", "w").close()
    while True:  # the signal may come late
        real(*rest)
run.prefill = prefill
"""
    options = ("llama-7b", "--layers", 1, "--context", "16k", "--device", "cpu", "--json", "--save", "record.json")
    process = start(tmp_path, *options, before=before)
    wait_for(tmp_path / "ready")
    time.sleep(0.5)
    process.signal(signal.SIGINT)
    assert process.result(timeout=60) == (130, "", "kvcalc: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_an_old_record_outlives_every_fault(kvcalc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert kvcalc("measure", *FAST, "--save", record).status == 0
    before = record.read_bytes()
    for error, _, _ in FAULTS.values():
        fail_in_decode(monkeypatch, error)
        assert kvcalc("measure", *FAST, "--save", record).status == 1
        assert record.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]
    assert json.loads(before)["runs"][0]["verified"]["ok"]
