"""The devices as documents: the list, and one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.schema import SCHEMA_VERSION
from kvcalc.throughput.hardware import Gpu, all_gpus, find_gpu


def list_gpus() -> dict[str, Any]:
    """Every device: memory, bandwidth, dense operations a second in bf16 (fp16 where it has no bf16) and fp8, and what
    joins several; by vendor, the largest memory first."""
    order = ("NVIDIA", "AMD", "Intel", "Google", "Apple")
    known = sorted(all_gpus(), key=lambda gpu: (order.index(gpu.vendor or order[-1]), -gpu.memory_bytes, gpu.name))
    return {"schema_version": SCHEMA_VERSION, "gpus": [_row(gpu) for gpu in known], "warnings": []}


def show_gpu(name: str) -> dict[str, Any]:
    """One device as its file states it; GpuError (exit 3) with the nearest names for an unknown one."""
    gpu = find_gpu(name)
    return {"schema_version": SCHEMA_VERSION, **describe_gpu(gpu, {"aliases": list(gpu.aliases)})}


def describe_gpu(gpu: Gpu, more: Mapping[str, Any]) -> dict[str, Any]:
    """A device's figures, with `more` after what it is called. A rate that is not known is null."""
    link = gpu.interconnect
    figures = {
        **gpu._asdict(),
        "bandwidth_bytes_per_second": gpu.bandwidth_bytes_per_second or None,
        "flops_per_second": dict(gpu.flops_per_second),
        "interconnect": None if link is None else link._asdict(),
    }
    del figures["aliases"]
    named = {key: figures.pop(key) for key in ("name", "vendor", "device_class")}
    return {**named, **more, **figures}


def _row(gpu: Gpu) -> dict[str, Any]:
    flops, link = gpu.flops_per_second, gpu.interconnect
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "device_class": gpu.device_class,
        "memory_bytes": gpu.memory_bytes,
        "bandwidth_bytes_per_second": gpu.bandwidth_bytes_per_second,
        "half_flops_per_second": flops.get("bf16") or flops.get("fp16"),
        "fp8_flops_per_second": flops.get("fp8"),
        "interconnect": None if link is None else link.name,
        "interconnect_bytes_per_second": None if link is None else link.bytes_per_second,
        "interconnect_devices": None if link is None else link.devices,
        "aliases": list(gpu.aliases),
        "source": gpu.source,
        "date": gpu.date,
    }
