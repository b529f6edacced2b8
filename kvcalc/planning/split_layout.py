"""The devices among which llama.cpp divides the layers."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.llama_cpp.splitting import MODE, NONE, SPLIT, count_devices
from kvcalc.errors import UsageError
from kvcalc.throughput.hardware import Devices


def split_layers(
    settings: Mapping[str, str], devices: Devices | None, size: int | None, stages: int, replicas: int
) -> tuple[Devices | None, int | None, int]:
    """The devices, the tensor-parallel size and the number of stages: one for each device that --tensor-split names.

    Without it, all devices are used, which is the default, unless `size`, `stages` or `replicas` say otherwise.
    UsageError (exit 2) if the settings contradict `stages` or the number of devices.
    """
    number = count_devices(settings) if SPLIT in settings or MODE in settings else None
    if number is None:
        is_open = size is None and stages == 1 and replicas == 1
        if devices is None or devices.num_devices == 1 or not is_open:
            return devices, size, stages
        number = devices.num_devices
    if stages not in (1, number):
        asked = f"--{SPLIT} {settings[SPLIT]}" if SPLIT in settings else f"--{MODE} {NONE}"
        raise UsageError(f"--pp {stages} contradicts {asked}", "remove --pp")
    if settings.get(MODE) == NONE and devices is not None:
        devices = devices._replace(num_devices=1)  # the others are not used
    elif SPLIT in settings and devices is not None and devices.num_devices > 1 and devices.num_devices % number:
        raise UsageError(
            f"--{SPLIT} {settings[SPLIT]} has {number} shares, but there are {devices.num_devices} devices",
            f"use --num-gpus {number}, or one share for each device (0 for a device without layers)",
        )
    return devices, size or 1, number
