"""The local device: its name, its free memory, its allocator, and synchronization."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import torch

from kvcalc.errors import UsageError

if TYPE_CHECKING:
    import kvcalc.documents as documents

KINDS = ("auto", "cpu", "cuda", "mps", "xpu")
"""CUDA's functions also serve AMD's GPUs, and XPU is Intel's."""

# The modules of torch with the same functions for memory, names and synchronization.
_MODULES = {"cuda": torch.cuda, "xpu": torch.xpu}

# AMD's cache between L2 and memory, which torch does not report, by architecture. MI300X and MI325X, MI350X and MI355X:
# AMD CDNA 3 and CDNA 4 white papers; Radeon RX 6000, 7000 and 9000: AMD's product pages, the largest of each chip.
_INFINITY_CACHE_MIB = {
    "gfx942": 256, "gfx950": 256, "gfx1030": 128, "gfx1031": 96, "gfx1032": 32, "gfx1100": 96, "gfx1101": 64,
    "gfx1102": 32, "gfx1200": 32, "gfx1201": 64,
}  # fmt: skip

# The largest L2 of Intel's GPUs, that of the Data Center GPU Max 1550 (its product brief). Older torch does not report
# one.
_XPU_CACHE_BYTES = 408 << 20

# Allocators round the size of a tensor up to a multiple of this. Source: kMinBlockSize in torch's
# c10/cuda/CUDACachingAllocator.cpp. A CUDA block may also keep up to 1 MiB that is not worth splitting off.
ALLOCATION_UNIT = {"cpu": 1, "cuda": 512}
ALLOCATION_SLACK = {"cuda": 1 << 20}

T = TypeVar("T")


def resolve_device(name: str) -> torch.device:
    """The device called `name`. `auto` is the first available one, and `cuda:1` the second GPU.

    Raises UsageError (exit 2) for an unknown name, or a device that this machine or this torch does not have.
    """
    kind, _, number = name.partition(":")
    if kind == "cuda" and number.isascii() and number.isdigit():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number) < count:
            return torch.device(kind, int(number))
        visible = ", ".join(f"cuda:{n}" for n in range(count)) or "no CUDA device"
        raise UsageError(f"--device {name[:40]}: not available (torch {torch.__version__})", f"available: {visible}")
    devices_here = ["cpu"]
    if torch.backends.mps.is_available():
        devices_here.insert(0, "mps")
    for kind in ("xpu", "cuda"):
        if _MODULES[kind].is_available():
            devices_here.insert(0, kind)
    if name == "auto":
        return torch.device(devices_here[0])
    if name not in KINDS:
        raise UsageError(f"--device {name[:40]!a}: not a device", f"one of {', '.join(KINDS)}")
    if name not in devices_here:
        raise UsageError(
            f"--device {name}: not available (torch {torch.__version__})", f"available: {', '.join(devices_here)}"
        )
    return torch.device(name)


def describe_device(device: torch.device) -> documents.MeasureDevice:
    """The `device` part of a document: kind, name, memory in bytes, threads (CPU only) and torch's version."""
    if device.type in _MODULES:
        gpu = _MODULES[device.type]
        name, total = gpu.get_device_name(device), gpu.mem_get_info(device)[1]
    else:
        name, total = processor_name(), psutil.virtual_memory().total
    return {
        "kind": cast(Any, device.type),
        "name": name,
        "memory_bytes": total,
        "free_bytes": free_bytes(device),
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "torch_version": str(torch.__version__),  # of a class of its own
    }


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now without swapping.

    For CUDA and XPU, this is the device's free memory. Otherwise, it is the smallest of the machine's free memory and
    all limits.
    """
    if device.type in _MODULES:
        gpu = _MODULES[device.type]
        # Memory that this process's allocator has reserved but does not use is free too.
        return int(gpu.mem_get_info(device)[0] + gpu.memory_reserved(device) - gpu.memory_allocated(device))
    free = psutil.virtual_memory().available
    if device.type == "mps":
        return min(free, max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()))
    limits = (_cgroup_free(), _address_space_free())
    return max(0, min([free, *(limit for limit in limits if limit is not None)]))


def last_level_cache_bytes(device: torch.device) -> int:
    """The size of the last-level cache. 32 MiB if unknown.

    For a GPU, this is its L2, or the Infinity Cache behind it. On Linux, it is the L3, but at most 32 MiB for each core
    that this machine sees: a virtual machine reports the L3 of the whole processor, of which it has a share.
    """
    size = whole_cache_bytes(device)
    return size if device.type in _MODULES else min(size, (32 << 20) * (psutil.cpu_count() or 1))


def whole_cache_bytes(device: torch.device) -> int:
    """The size of the last-level cache, and on a virtual machine that of the whole processor. 32 MiB if unknown."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        return max(int(properties.L2_cache_size), _INFINITY_CACHE_MIB.get(architecture, 0) << 20)
    if device.type == "xpu":
        return int(getattr(torch.xpu.get_device_properties(device), "last_level_cache_size", 0)) or _XPU_CACHE_BYTES
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size", encoding="utf-8") as file:
            return int(file.read().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20


class MemoryWatch:
    """The peak memory since this object was created, from the allocator on CUDA and XPU, or the process on Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type in _MODULES:
            _MODULES[device.type].reset_peak_memory_stats(device)
            self._before = _allocated(device)
        elif device.type == "cpu":
            self._before = _resident_peak(reset=True)

    def describe(self) -> documents.RunMemory:
        """The `memory` part of a run: growth of the peak, reserved bytes of the allocator, and their unused share.

        A value is None if the device or the system does not report it.
        """
        peak = reserved = fragmentation = None
        if self._device.type in _MODULES:
            gpu = _MODULES[self._device.type]
            peak, reserved = gpu.max_memory_allocated(self._device), gpu.memory_reserved(self._device)
            unused = reserved - _allocated(self._device)
            fragmentation = unused / reserved if reserved else 0.0
        elif self._before is not None:
            peak = _resident_peak(reset=False)
        grown = None if peak is None or self._before is None else max(0, peak - self._before)
        return {"peak_bytes": grown, "reserved_bytes": reserved, "fragmentation": fragmentation}


def _resident_peak(reset: bool) -> int | None:
    """The peak memory of this process, or None if the system does not report it. `reset` resets the peak first."""
    try:
        if reset:
            with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
                file.write("5")
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    except (OSError, ValueError, StopIteration):
        return None


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type in _MODULES:
        _MODULES[device.type].synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def release(device: torch.device) -> None:
    """Return unused memory to the device."""
    import gc

    gc.collect()
    if device.type in _MODULES:
        _MODULES[device.type].empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif sys.platform == "linux":
        # glibc keeps what was freed between two used blocks. Other C libraries have no such function.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def allocated_by(device: torch.device, make: Callable[[], T]) -> tuple[T, int]:
    """The result of `make`, and the number of bytes by which the device's allocator grew.

    On a CPU, torch's allocator has no total, so torch's profiler adds up allocations and frees.
    """
    if device.type == "cpu":
        from torch.autograd.profiler import profile

        # The profiler's library logs its start and stop on stderr. This must be turned off before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with profile(profile_memory=True) as profiler:
            made = make()
        return made, sum(event.self_cpu_memory_usage for event in profiler.key_averages())
    before = _allocated(device)
    made = make()
    synchronize(device)
    return made, _allocated(device) - before


def storage_bytes(holders: Iterable[object]) -> list[int]:
    """The bytes of every storage behind the tensors that are attributes of `holders`, alone or in a tuple."""
    values = (value for holder in holders for value in vars(holder).values())
    tensors = (t for value in values for t in (value if isinstance(value, tuple) else (value,)))
    storages = (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor))
    return [*{storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values()]


def _allocated(device: torch.device) -> int:
    if device.type in _MODULES:
        return int(_MODULES[device.type].memory_allocated(device))
    return torch.mps.current_allocated_memory()


def processor_name() -> str:
    """The processor's name, from /proc/cpuinfo on Linux, else from the platform module."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _cgroup_free(root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes left within the memory limits of this process's control groups, including page cache that can be dropped.

    A container's limit is not in /proc/meminfo, and a process that exceeds it is killed. None if there is no limit.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, limit, used = os.path.join(root, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # The limits of all ancestors apply too. Inside a container, only the root may exist, not the path.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group_free = _group_free(os.path.join(folder, *parts[:depth]), limit, used)
            if group_free is not None:
                left.append(group_free)
    return min(left) if left else None


def _group_free(folder: str, limit_file: str, used_file: str) -> int | None:
    try:
        limit, used = _read_int(os.path.join(folder, limit_file)), _read_int(os.path.join(folder, used_file))
        with open(os.path.join(folder, "memory.stat"), encoding="utf-8") as file:
            stat = dict(line.split() for line in file)
    except (OSError, ValueError):
        return None
    return limit - used + int(stat.get("inactive_file", 0)) if limit < sys.maxsize // 2 else None


def _read_int(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        text = file.read().strip()
    return sys.maxsize if text == "max" else int(text)


def _address_space_free() -> int | None:
    """Bytes of address space left within `ulimit -v`. None if it is not set."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit - int(psutil.Process().memory_info().vms)
