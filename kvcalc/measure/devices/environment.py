"""The environment of a run, for its record: system, processor, driver and libraries.

It never contains the name of a machine or user, or a path.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from typing import TYPE_CHECKING

import psutil
import torch

from kvcalc import __version__

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Packages that may affect the figures, if installed.
_LIBRARIES = ("torch", "triton", "numpy", "psutil")

# Key of the record -> the property's name in nvidia-smi.
_CLOCKS_AND_POWER = {
    "sm_clock_mhz": "clocks.sm", "memory_clock_mhz": "clocks.mem", "power_watts": "power.draw",
    "power_limit_watts": "power.limit",
}  # fmt: skip


def describe_environment(device: torch.device) -> documents.Environment:
    """The `environment` part of a document: everything except the workload that a figure may depend on."""
    is_cuda = device.type == "cuda"
    rates = _clocks_and_power(device) if is_cuda else {}
    return {
        "taken_at": datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "kvcalc_version": __version__,
        "python_version": platform.python_version(),
        "system": platform.system(),
        "system_release": platform.release(),
        "machine": platform.machine(),
        "logical_cores": psutil.cpu_count(logical=True),
        "memory_bytes": psutil.virtual_memory().total,
        "device_count": torch.cuda.device_count() if is_cuda else 1,
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if is_cuda else None,
        "driver_version": _driver_version() if is_cuda else None,
        "cuda_version": torch.version.cuda,
        "hip_version": torch.version.hip,
        "cudnn_version": _cudnn_version() if is_cuda else None,
        "nccl_version": _nccl_version() if is_cuda else None,
        "sm_clock_mhz": rates.get("sm_clock_mhz"),
        "memory_clock_mhz": rates.get("memory_clock_mhz"),
        "power_watts": rates.get("power_watts"),
        "power_limit_watts": rates.get("power_limit_watts"),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    """The driver version from NVIDIA's kernel module on Linux, else from nvidia-smi. None if neither is available."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.readline())
        if match:
            return match[1]
    except OSError:
        pass
    said = _ask_driver(("driver_version",))
    return said[0] if said else None


def _clocks_and_power(device: torch.device) -> dict[str, float | None]:
    """The clocks and the power of `device` now, and its power limit. None for what nvidia-smi does not say."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    said = _ask_driver(tuple(_CLOCKS_AND_POWER.values()), *([f"--id=GPU-{uuid}"] if uuid else []))
    return {key: _number(text) for key, text in zip(_CLOCKS_AND_POWER, said or [""] * len(_CLOCKS_AND_POWER))}


def _ask_driver(properties: tuple[str, ...], *options: str) -> list[str] | None:
    """What nvidia-smi says about `properties` of the first device, or None if it cannot be asked."""
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(properties)}", "--format=csv,noheader,nounits", *options]
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - found in PATH
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in said.stdout.partition("\n")[0].split(",")]
    return values if len(values) == len(properties) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A] in a virtual machine
        return None


def _cudnn_version() -> str | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return None if version is None else str(version)


def _nccl_version() -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))
