"""The accelerator of this machine as a `Gpu`, found by torch, or else by NVIDIA's management library."""

from __future__ import annotations

from kvcalc.errors import GpuError, RunError
from kvcalc.throughput.hardware import Devices, Gpu, find_gpu

_HINT = "name one: --gpu h100 (kvcalc gpus lists them)"


def local_devices() -> Devices:
    """The devices of this machine that are the same as the first one. The driver reports their memory.

    A device with a preset gets the preset's bandwidth and FLOP/s. Other devices have none. Raises RunError (exit 1) if
    there is no device, or if neither torch nor NVIDIA's library is installed.
    """
    seen = _seen_by_torch()
    if seen is None:
        seen = _seen_by_driver()
    if seen is None:
        raise RunError("--gpu local: neither torch nor nvidia-ml-py is installed", "pip install 'kvcalc[measure]'")
    if not seen:
        raise RunError("--gpu local: this machine has no accelerator", _HINT)
    name, memory = seen[0]
    alike = sum(other == name for other, _ in seen)
    try:
        gpu = find_gpu(name)._replace(memory_bytes=memory)
        gpu = gpu._replace(source=f"{gpu.source}; memory from the driver")
    except GpuError:
        gpu = Gpu(name, None, None, memory, None, 0, {}, None, None, None, (), "the driver", None)
    return Devices(gpu, alike)


def _seen_by_torch() -> list[tuple[str, int]] | None:
    """The name and memory of every device. Empty if there is no device, None if torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    for gpu in (torch.cuda, torch.xpu):
        if gpu.is_available():
            return [(gpu.get_device_name(n), int(gpu.mem_get_info(n)[1])) for n in range(gpu.device_count())]
    if torch.backends.mps.is_available():
        import psutil

        from kvcalc.measure.devices.device import processor_name

        return [(processor_name(), int(psutil.virtual_memory().total))]
    return []


def _seen_by_driver() -> list[tuple[str, int]] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return [(_text(pynvml.nvmlDeviceGetName(h)), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
    except pynvml.NVMLError:
        return []


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
