"""Chooses devices by name, by number or by their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import LOCAL, Devices, Gpu, find_devices, find_gpu, own_gpu

__all__ = ["Devices", "Gpu", "choose_devices", "choose_kinds", "find_gpu"]


Figures = tuple["int | None", "int | None", "int | None"]
"""A device's memory in bytes, its bandwidth in bytes per second and its bf16 operations per second."""


def choose_devices(
    name: str | None, num_devices: int | None, figures: Figures, local: Callable[[], Devices]
) -> Devices:
    """The devices with this name (`h100x8`), or devices described by their memory. `figures` override the preset's.

    For the name `local`, the function `local` detects the devices of this machine. `num_devices` of the result is 1 if
    no number is given. Raises GpuError (exit 3) for an unknown name, UsageError (exit 2) for contradicting arguments,
    and the errors of `local`.
    """
    number, named = 1, None
    if name is not None and name.casefold() == LOCAL:
        named = local().gpu
    elif name is not None:
        named, number = find_devices(name)
        if num_devices is not None and number not in (1, num_devices):
            raise UsageError(f"--gpu {name} and --num-gpus {num_devices} contradict each other")
    return Devices(own_gpu(named, *figures), num_devices or number)


def choose_kinds(names: Sequence[str], figures: Figures, local: Callable[[], Devices]) -> list[Devices]:
    """The devices with these names, each once. Their number is the one in the name, or 1. The figures describe one.

    Raises the errors of `choose_devices`, and UsageError (exit 2) for figures with several names.
    """
    if len(names) > 1 and figures != (None, None, None):
        raise UsageError("--gpu-memory, --gpu-bandwidth and --flops describe one device, but --gpu names several")
    found: dict[tuple[str, int], Devices] = {}
    for name in names or (None,):
        devices = choose_devices(name, None, figures, local)
        found[devices.gpu.name, devices.num_devices] = devices
    return list(found.values())
