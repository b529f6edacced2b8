"""Options that say what a model runs on, and the devices they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from kvcalc.cli.options import optional
from kvcalc.errors import UsageError
from kvcalc.units import parse_bandwidth, parse_count, parse_flops, parse_size, parse_tokens

if TYPE_CHECKING:
    from kvcalc.planning.devices import Devices
    from kvcalc.planning.devices import Gpu as GpuKind
    from kvcalc.planning.throughput import SpeedQuestion

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

_SPEED = "How fast"
Ep = Annotated[
    Optional[str],
    typer.Option(
        "--ep",
        "--expert-parallel-size",
        metavar="E",
        help="Of the --tp devices, how many whole experts are dealt out over. Default: 1, each is split.",
        rich_help_panel=_SPEED,
    ),
]
InputTokens = Annotated[
    Optional[str],
    typer.Option("--input-tokens", metavar="N", help="Serving: tokens of a prompt.", rich_help_panel=_SPEED),
]
OutputTokens = Annotated[
    Optional[str],
    typer.Option("--output-tokens", metavar="N", help="Serving: tokens of an answer.", rich_help_panel=_SPEED),
]
Concurrency = Annotated[
    Optional[str],
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Serving: requests kept in flight. Default: as many as fit.",
        rich_help_panel=_SPEED,
    ),
]
Calibrate = Annotated[
    Optional[str],
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="A record of `kvcalc measure --json` on this device: its constants in place of fitted ones.",
        rich_help_panel=_SPEED,
    ),
]


def speed_of(given: Mapping[str, Any]) -> SpeedQuestion | None:
    """What the options ask of speed; None where none of them is given."""
    names = ("ep", "input_tokens", "output_tokens", "concurrency", "calibrate")
    if all(given[name] is None for name in names):
        return None
    from kvcalc.planning.throughput import SpeedQuestion, calibrated

    given_tokens, taken_tokens = (
        optional(parse_tokens, given[name], f"--{name.replace('_', '-')}") for name in names[1:3]
    )
    ranks = optional(parse_count, given["ep"], "--ep") or 1
    concurrency = optional(parse_count, given["concurrency"], "--concurrency")
    question = SpeedQuestion(ranks, given_tokens, taken_tokens, concurrency)
    return question if given["calibrate"] is None else calibrated(question, given["calibrate"])


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

    return choose_devices(
        gpu,
        optional(parse_count, num_gpus, "--num-gpus"),
        optional(parse_size, memory, "--gpu-memory"),
        optional(parse_bandwidth, bandwidth, "--gpu-bandwidth"),
        optional(parse_flops, flops, "--flops"),
        _local_devices,
    )


def _local_devices() -> Devices:
    from kvcalc.measure.local import local_devices

    return local_devices()


def kinds_of(names: Sequence[str]) -> list[GpuKind]:
    """The kinds of device of these names, how many of each being for the layout to say."""
    if not names:
        return []
    from kvcalc.planning.devices import choose_kinds

    return choose_kinds(names, _local_devices)


def layout_of(given: Mapping[str, Any]) -> tuple[Devices | None, int]:
    """The devices of the options, or None, and the tensor-parallel size."""
    size = optional(parse_count, given["tp"], "--tp")
    devices = devices_of(given["gpu"], given["num_gpus"], given["gpu_memory"], given["gpu_bandwidth"], given["flops"])
    if devices is None:
        return None, size or 1
    from kvcalc.planning.budget import lay_out

    return lay_out(devices, size, stages_of(given))


def stages_of(given: Mapping[str, Any]) -> int:
    """The pipeline stages of the options."""
    return optional(parse_count, given["pipeline_parallel_size"], "--pipeline-parallel-size") or 1
