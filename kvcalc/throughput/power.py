"""The power of a replica's devices and the energy of a token, from the devices' TDP and what bounds the step.

    watts = devices x (idle + (TDP - idle) x utilization)
    utilization = 1 for the share of the time that is bound by operations, 0.73 for the rest

The host, its memory, the network, fans and cooling are not counted.

The utilization is fitted on ML.ENERGY's measurements (leaderboard v3, vLLM on H100, ml-energy/leaderboard, February
2026): steady serving of Llama-3.1-8B, Qwen3-32B and gpt-oss-20b. docs/concepts/energy.md has the errors on other models
and devices. A step that only waits for memory still draws most of the TDP: the measured share is 0.57 to 0.99 of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

# The share of the TDP of an idle device that keeps a model in memory: nvidia-smi shows 78 W of 700 W on an H200
# (NVIDIA/TensorRT-LLM#9554).
_IDLE = 0.11
# The share of the power between idle and the TDP that a step draws while it is not compute-bound.
_WAITING = 0.73
# Measured / predicted power, 10th and 90th percentile of models that were not fitted: on the fitted kind of device, and
# on another one (B200).
_RANGE, _RANGE_ELSEWHERE = (0.83, 1.16), (0.62, 1.18)
_FITTED_CLASS = "hopper"
_JOULES_PER_KWH = 3.6e6


class Energy(NamedTuple):
    """The power of all devices of a replica, and the energy that they use per output token, with its 80 % range."""

    watts: float
    joules_per_token: float
    low_joules_per_token: float
    high_joules_per_token: float

    @property
    def kwh_per_million_tokens(self) -> float:
        return kwh_per_million(self.joules_per_token)


def kwh_per_million(joules_per_token: float) -> float:
    """The kWh of a million tokens."""
    return joules_per_token * 1e6 / _JOULES_PER_KWH


def mean_watts(gpu: Gpu, devices: int, compute_share: float, busy_share: float = 1.0) -> float | None:
    """The mean power of `devices` devices on which steps run for `busy_share` of the time. None without a TDP.

    `compute_share` is the share of this time that is bound by operations. Without a step, a device is idle.
    """
    if gpu.tdp_watts is None:
        return None
    utilization = _WAITING + (1 - _WAITING) * min(max(compute_share, 0.0), 1.0)
    return devices * gpu.tdp_watts * (_IDLE + (1 - _IDLE) * utilization * min(busy_share, 1.0))


def energy_per_token(
    gpu: Gpu, devices: int, compute_share: float, tokens_per_second: float, time_range: tuple[float, float]
) -> Energy | None:
    """The energy of a token if `devices` devices make `tokens_per_second` output tokens together. None without a TDP.

    `compute_share` is the share of the time that is bound by operations. `time_range` are the factors on the time for
    its low and high end. The range of the result combines it with that of the power, as independent errors.
    """
    watts = mean_watts(gpu, devices, compute_share)
    if watts is None:
        return None
    joules = watts / tokens_per_second
    power_range = _RANGE if gpu.device_class == _FITTED_CLASS else _RANGE_ELSEWHERE
    low = math.hypot(math.log(power_range[0]), math.log(time_range[0]))
    high = math.hypot(math.log(power_range[1]), math.log(time_range[1]))
    return Energy(watts, joules, joules * math.exp(-low), joules * math.exp(high))
