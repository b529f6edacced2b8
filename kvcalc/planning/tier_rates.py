"""The rate at which a tier of memory is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.engines.reuse import CPU, DISK
from kvcalc.notes import Note
from kvcalc.planning.cache_tiers import NVME_BYTES_PER_SECOND

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

# NVLink-C2C between Grace and Hopper: 900 GB/s in both directions together (NVIDIA GH200 data sheet).
_C2C = {"gh200-96gb": 450_000_000_000, "gh200-144gb": 450_000_000_000}


def tier_rate(name: str, gpu: Gpu | None, given: Mapping[str, int], notes: list[Note], part: str) -> int | None:
    """Bytes per second at which a tier is read: by each device if it is host memory, else in total.

    None if the rate is not known. A note about `part` of the document then says how to set it. Without a device nothing
    is timed, and there is no note about its link.
    """
    if name in given:
        return given[name]
    rate: int | None = None
    if name == CPU:
        if gpu is None:
            return None
        rate = _C2C.get(gpu.name, gpu.pcie_bytes_per_second)
        text, example = f"the link of {gpu.name} to host memory is not known", "50GB/s"
    elif name == DISK:
        rate = NVME_BYTES_PER_SECOND
        text, example = f"disk is assumed to read {rate / 1e9:g} GB/s, one NVMe drive on PCIe 4.0", "6GB/s"
    else:
        text, example = f"the rate of {name} is not known", "ethernet-100g"
    if rate is None or name == DISK:
        notes.append(Note(part, "tier-bandwidth", f"{text}; --offload-bandwidth {name}={example} sets it"))
    return rate
