"""The documents of `kvcalc gpus`: the list of devices, and one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import UsageError, nearest
from kvcalc.model.memo import remembered
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.case import Case
from kvcalc.server.layout import count_replicas
from kvcalc.throughput.hardware import Gpu, all_gpus, find_gpu
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The vendors in the order of the list. Other vendors follow, by name.
_VENDORS = {vendor: place for place, vendor in enumerate(("NVIDIA", "AMD", "Intel", "Google", "Apple"))}


def list_gpus(vendor: str | None = None, least_bytes: int = 0) -> documents.Gpus:
    """All devices, sorted by vendor and then by memory, the largest first.

    `vendor` selects one vendor, and `least_bytes` the devices with at least this much memory. UsageError (exit 2) if
    there is none.
    """
    everything = sorted(all_gpus(), key=_place)
    vendors = [str(gpu.vendor) for gpu in everything]
    if vendor is not None and vendor.casefold() not in map(str.casefold, vendors):
        hint = nearest(vendor, vendors) or f"vendors: {', '.join(dict.fromkeys(vendors))}"
        raise UsageError(f"--vendor {vendor[:60]!r}: no such vendor", hint)
    known = [
        gpu for gpu in everything
        if vendor is None or vendor.casefold() == str(gpu.vendor).casefold()
        if gpu.memory_bytes >= least_bytes
    ]  # fmt: skip
    if not known:
        largest = format_size(max(gpu.memory_bytes for gpu in everything), capacity=True)
        raise UsageError("no device has this much memory", f"the largest has {largest}")
    return {
        "schema_version": SCHEMA_VERSION,
        "gpus": list(map(_describe_listed, known)),
        "warnings": [],
    }


def _place(gpu: Gpu) -> tuple[int, str, int, str]:
    vendor = gpu.vendor or ""
    return _VENDORS.get(vendor, len(_VENDORS)), vendor.casefold(), -gpu.memory_bytes, gpu.name


def show_gpu(name: str) -> documents.GpusShow:
    """One device with the figures of its preset. GpuError (exit 3) with the nearest names if the name is unknown."""
    gpu = find_gpu(name)
    return {"schema_version": SCHEMA_VERSION, **_describe_listed(gpu)}


def _describe_listed(gpu: Gpu) -> documents.GpusGpusItem:
    return cast("documents.GpusGpusItem", describe_gpu(gpu, {"aliases": list(gpu.aliases)}))


def describe_gpu(gpu: Gpu, more: Mapping[str, Any]) -> dict[str, Any]:
    """A device's figures, with the keys of `more` after its name. Rates that are not known are null."""
    named, figures = _figures_of(gpu)
    link = figures["interconnect"]
    return {
        **named,
        **more,
        **figures,
        "flops_per_second": dict(gpu.flops_per_second),
        "interconnect": None if link is None else dict(link),
    }


def describe_hardware(case: Case) -> documents.Hardware:
    """The `hardware` part of a document: the figures of one device, and the number of devices."""
    gpu, number = case.devices
    of_question = {"num_devices": number, "replicas": count_replicas(number, case.layout)}
    return cast("documents.Hardware", describe_gpu(gpu, of_question))


@remembered
def _figures_of(gpu: Gpu) -> tuple[dict[str, Any], dict[str, Any]]:
    """The device's name and kind, and its other figures."""
    link = gpu.interconnect
    figures = {
        **gpu._asdict(),
        "bandwidth_bytes_per_second": gpu.bandwidth_bytes_per_second or None,
        "flops_per_second": dict(gpu.flops_per_second),
        "interconnect": None if link is None else link._asdict(),
    }
    del figures["aliases"]
    named = {key: figures.pop(key) for key in ("name", "vendor", "device_class")}
    return named, figures
