"""Time a thing many times, honestly: every call ends with the device finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvcalc.measure.device import synchronize


def time_call(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds one `call` takes, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def summarize(seconds: list[float]) -> dict[str, Any]:
    """Median, 90th percentile (nearest rank), minimum and number of timings, in seconds."""
    ordered = sorted(seconds)
    return {
        "p50": _percentile(ordered, 50),
        "p90": _percentile(ordered, 90),
        "min": ordered[0],
        "n": len(ordered),
    }


def _percentile(ordered: list[float], percent: int) -> float:
    """The nearest-rank percentile: a time that was really taken."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
