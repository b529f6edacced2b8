"""The local device: from torch, from the driver if torch is not installed, and a clear error if there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvcalc.errors import RunError
from kvcalc.measure.devices import local
from kvcalc.throughput.hardware import find_gpu


def seen(monkeypatch: pytest.MonkeyPatch, torch: Any, driver: Any) -> None:
    monkeypatch.setattr(local, "_seen_by_torch", lambda: torch)
    monkeypatch.setattr(local, "_seen_by_driver", lambda: driver)


def test_a_known_device_has_its_presets_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, [("NVIDIA H200", 150_000_000_000)] * 2 + [("NVIDIA L4", 23)], None)
    found = local.local_devices()
    assert found.num_devices == 2
    assert found.gpu.name == "h200-sxm"
    assert found.gpu.memory_bytes == 150_000_000_000
    assert found.gpu.bandwidth_bytes_per_second == find_gpu("h200").bandwidth_bytes_per_second
    assert "driver" in found.gpu.source


def test_an_unknown_device_is_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, None, [("NVIDIA Tegra X1", 4_000_000_000)])
    gpu = local.local_devices().gpu
    assert (gpu.name, gpu.memory_bytes, gpu.flops_per_second) == ("NVIDIA Tegra X1", 4_000_000_000, {})


@pytest.mark.parametrize(
    ("torch", "driver", "said"), [([], None, "has no accelerator"), (None, [], "no accelerator"), (None, None, "pip")]
)
def test_none(monkeypatch: pytest.MonkeyPatch, torch: Any, driver: Any, said: str) -> None:
    seen(monkeypatch, torch, driver)
    with pytest.raises(RunError) as caught:
        local.local_devices()
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.exit_code == 1


def test_the_driver_is_asked_where_torch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    pynvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetName=lambda handle: b"NVIDIA A10G",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24_146_608_128),
    )
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert local.local_devices().gpu.name == "a10g"
    assert local.local_devices().gpu.memory_bytes == 24_146_608_128

    def fail() -> None:
        raise NVMLError

    pynvml.nvmlInit = fail
    with pytest.raises(RunError, match="no accelerator"):
        local.local_devices()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(RunError, match="installed"):
        local.local_devices()


def test_torch_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert local._seen_by_torch() == []


def test_torch_with_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (1, 191_000_000_000))
    assert local.local_devices().num_devices == 2
    assert local.local_devices().gpu.name == "b200-sxm"
