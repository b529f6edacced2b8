"""Options that say what a model runs on, and the devices they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from kvcalc.cli.options import optional_count
from kvcalc.errors import UsageError

if TYPE_CHECKING:
    from kvcalc.planning.devices import Devices

_DEVICE = "The device"
Gpu = Annotated[
    Optional[str],
    typer.Option(
        "--gpu",
        metavar="NAME[xN]",
        help="What it runs on: h100, h100x8, rtx-4090 (`kvcalc gpus`), or local: what is here.",
        rich_help_panel=_DEVICE,
    ),
]
NumGpus = Annotated[
    Optional[str],
    typer.Option(
        "--num-gpus", metavar="N", help="How many devices. Default: tp x pp; and tp's is N.", rich_help_panel=_DEVICE
    ),
]
GpuMemory = Annotated[
    Optional[str],
    typer.Option(
        "--gpu-memory",
        metavar="SIZE",
        help="A device's memory: of your own (80G, 80GiB), or for --gpu's.",
        rich_help_panel=_DEVICE,
    ),
]
GpuBandwidth = Annotated[
    Optional[str],
    typer.Option(
        "--gpu-bandwidth",
        "--bandwidth",
        metavar="RATE",
        help="Bytes a second it reads: 3.35TB/s. Also --bandwidth.",
        rich_help_panel=_DEVICE,
    ),
]
Flops = Annotated[
    Optional[str],
    typer.Option("--flops", metavar="RATE", help="Dense bf16 operations a second: 989T.", rich_help_panel=_DEVICE),
]


def devices_of(
    gpu: str | None, num_gpus: str | None, memory: str | None, bandwidth: str | None, flops: str | None
) -> Devices | None:
    """The devices the options name or describe, `num_devices` 1 where no number is given; None where none is.

    Raises GpuError (exit 3) for a name nobody knows, UsageError (exit 2) for what contradicts itself, and RunError
    (exit 1) for `local` where there is no device.
    """
    if gpu is None and memory is None:
        for option, text in (("--num-gpus", num_gpus), ("--gpu-bandwidth", bandwidth), ("--flops", flops)):
            if text is not None:
                raise UsageError(
                    f"{option}: of which device?", "name it, --gpu h100, or describe it, --gpu-memory 80GB"
                )
        return None
    from kvcalc.planning.devices import choose_devices
    from kvcalc.units import parse_bandwidth, parse_flops, parse_size

    return choose_devices(
        gpu,
        optional_count(num_gpus, "--num-gpus"),
        None if memory is None else parse_size(memory, "--gpu-memory"),
        None if bandwidth is None else parse_bandwidth(bandwidth, "--gpu-bandwidth"),
        None if flops is None else parse_flops(flops, "--flops"),
        _local_devices,
    )


def _local_devices() -> Devices:
    from kvcalc.measure.local import local_devices

    return local_devices()


def layout_of(given: Mapping[str, Any]) -> tuple[Devices | None, int]:
    """The devices of the options, or None, and the tensor-parallel size."""
    from kvcalc.units import parse_count

    size = optional_count(given["tp"], "--tp")
    devices = devices_of(given["gpu"], given["num_gpus"], given["gpu_memory"], given["gpu_bandwidth"], given["flops"])
    if devices is None:
        return None, size or 1
    from kvcalc.planning.budget import lay_out

    stages = given["pipeline_parallel_size"]
    return lay_out(devices, size, 1 if stages is None else parse_count(stages, "--pipeline-parallel-size"))
