"""The number of devices among which llama.cpp divides the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.memory.engines.llama_cpp.splitting import MODE, NONE, SPLIT, count_devices

if TYPE_CHECKING:
    from kvcalc.planning.case import Question


def with_split(question: Question) -> Question:
    """The question with a stage for each device that --tensor-split names, or else for all devices (the default).

    UsageError (exit 2) if that contradicts --pp.
    """
    settings, devices = question.engine_settings or {}, question.devices
    stages, size = question.pipeline_parallel_size, question.tensor_parallel_size
    number = count_devices(settings) if SPLIT in settings or MODE in settings else None
    if number is None:
        is_open = size is None and stages == 1 and question.data_parallel_size == 1
        if devices is None or devices.num_devices == 1 or not is_open:
            return question
        number = devices.num_devices
    if stages not in (1, number):
        asked = f"--{SPLIT} {settings[SPLIT]}" if SPLIT in settings else f"--{MODE} {NONE}"
        raise UsageError(f"--pp {stages} contradicts {asked}", "remove --pp")
    if settings.get(MODE) == NONE and devices is not None:
        devices = devices._replace(num_devices=1)  # the others are not used
    return question._replace(devices=devices, tensor_parallel_size=size or 1, pipeline_parallel_size=number)
