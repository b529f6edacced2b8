"""Intel's GPUs: torch.xpu is called as its signatures say. No such device has run the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcalc.errors import RunError, UsageError
from kvcalc.measure.devices import device as devices
from kvcalc.measure.devices import local
from kvcalc.measure.devices.distributed import Place, device_of
from kvcalc.measure.devices.faults import explain

XPU = torch.device("xpu")
GIB = 1 << 30
VALUES: dict[str, Any] = {
    "is_available": True,
    "device_count": 2,
    "get_device_name": "Intel(R) Arc(TM) B580 Graphics",
    "get_device_properties": SimpleNamespace(last_level_cache_size=18 << 20),
    "mem_get_info": (9 * GIB, 12 * GIB),
    "memory_allocated": GIB,
    "memory_reserved": 2 * GIB,
    "max_memory_allocated": 3 * GIB,
    "reset_peak_memory_stats": None,
    "synchronize": None,
    "empty_cache": None,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of torch.xpu's functions, which refuse arguments that the real ones do not take."""
    made: list[str] = []

    def stand_in(name: str, signature: inspect.Signature) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            signature.bind(*arguments, **named)
            made.append(name)
            return VALUES[name]

        return call

    for name in VALUES:
        monkeypatch.setattr(torch.xpu, name, stand_in(name, inspect.signature(getattr(torch.xpu, name))))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return made


def test_it_is_chosen_before_the_processor(calls: list[str]) -> None:
    assert devices.resolve_device("auto") == devices.resolve_device("xpu") == XPU
    with pytest.raises(UsageError) as refused:
        devices.resolve_device("cuda")
    assert refused.value.hint == "available: xpu, cpu"


def test_a_torch_without_one_refuses_it() -> None:
    with pytest.raises(UsageError, match="not available"):
        devices.resolve_device("xpu")


def test_its_memory_is_the_devices(calls: list[str]) -> None:
    described = devices.describe_device(XPU)
    assert (described["kind"], described["name"]) == ("xpu", VALUES["get_device_name"])
    assert described["memory_bytes"] == 12 * GIB
    assert described["free_bytes"] == (9 + 2 - 1) * GIB  # what the allocator has reserved and does not use is free
    assert described["last_level_cache_bytes"] == 18 << 20


def test_an_older_torch_does_not_report_the_cache(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VALUES, "get_device_properties", SimpleNamespace())
    assert devices.last_level_cache_bytes(XPU) == 408 << 20


def test_the_allocators_figures(calls: list[str]) -> None:
    assert devices.MemoryWatch(XPU).describe() == {
        "peak_bytes": 2 * GIB, "reserved_bytes": 2 * GIB, "fragmentation": 0.5,
    }  # fmt: skip
    assert devices.allocated_by(XPU, lambda: 7) == (7, 0)
    assert "synchronize" in calls
    devices.release(XPU)
    assert calls[-1] == "empty_cache"


def test_gpu_local_finds_it(calls: list[str]) -> None:
    found = local.local_devices()
    assert (found.num_devices, found.gpu.memory_bytes) == (2, 12 * GIB)


def test_one_process_has_one(calls: list[str]) -> None:
    assert device_of(XPU, Place(0, 1, 0, 1)) == XPU
    with pytest.raises(UsageError, match="not on xpu"):
        device_of(XPU, Place(0, 2, 0, 2))


def test_its_failures_are_one_line() -> None:
    lost = explain(RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"))
    full = explain(RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"))
    assert isinstance(lost, RunError)
    assert "the device failed" in str(lost)
    assert "out of memory" in str(full)
