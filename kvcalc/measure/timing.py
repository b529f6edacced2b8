"""Time a thing many times, honestly: every call ends with the device finished, and none finds its data in a cache that
the device's memory is not.

CUDA: the work is captured into a graph once and replayed between two events, so that no launch is timed; where it
cannot be captured it is launched between the events. CPU: wall time and the process's CPU time. MPS: wall time,
synchronised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kvcalc.measure.device import last_level_cache_bytes, synchronize

# From this spread on, (p90 - min) / p50, a median says little.
MOST_SPREAD = 0.5

_WARM_UP_CALLS = 3
# A flushing buffer is so many times the last-level cache; data larger than so many times it flushes itself.
_FLUSH, _FLUSHES_ITSELF = 2, 4


class Timings(NamedTuple):
    """Seconds of every call; `cpu_seconds` the process's own, all threads (CPU alone); `method` how they were taken."""

    seconds: list[float]
    cpu_seconds: list[float] | None
    method: str


class Effort(NamedTuple):
    """How much is read, multiplied and flushed to judge a run's times. None: as much as the device needs.

    `read_bytes` is the buffer of the read roof and `matrix_width` the side of the matmul roof's matrices. `cache_bytes`
    is the last-level cache that is emptied before each timed call.
    """

    read_bytes: int | None = None
    matrix_width: int | None = None
    cache_bytes: int | None = None


def time_call(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds one `call` takes, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def flusher(device: torch.device, bytes_touched: int, effort: Effort = Effort()) -> Callable[[], object] | None:
    """What empties the device's last-level cache, to be called before each timed call; None where the `bytes_touched`
    by a call are so many that it does so itself."""
    size = last_level_cache_bytes(device) if effort.cache_bytes is None else effort.cache_bytes
    if bytes_touched >= _FLUSHES_ITSELF * size:
        return None
    buffer = torch.zeros(_FLUSH * size // 4, dtype=torch.float32, device=device)
    return buffer.zero_ if device.type == "cuda" else buffer.sum


def time_calls(
    device: torch.device, call: Callable[[], object], count: int, flush: Callable[[], object] | None = None,
    before: Callable[[], object] | None = None, may_capture: bool = True,
) -> Timings:  # fmt: skip
    """Time `call` `count` times. `before` runs ahead of each, untimed. `call` must do the same work every time.

    `may_capture` False keeps it out of a CUDA graph.
    """
    for _ in range(_WARM_UP_CALLS):
        call()
    synchronize(device)
    replay, method = call, "wall clock"
    if device.type == "cuda":
        replay, method = _captured(device, call) if may_capture else (call, "CUDA events")
    seconds, cpu_seconds = [], []
    for _ in range(count):
        for prepare in (before, flush):
            if prepare is not None:
                prepare()
        if device.type == "cuda":
            seconds.append(_between_events(replay))
            continue
        synchronize(device)
        cpu = time.process_time()
        seconds.append(time_call(device, call))
        cpu_seconds.append(time.process_time() - cpu)
    return Timings(seconds, cpu_seconds if device.type == "cpu" else None, method)


def summarize(seconds: list[float]) -> dict[str, Any]:
    """Median, 90th percentile (nearest rank), minimum and number of timings, in seconds, and their spread: 90th
    percentile less minimum, over the median."""
    ordered = sorted(seconds)
    p50, p90 = _percentile(ordered, 50), _percentile(ordered, 90)
    return {
        "p50": p50,
        "p90": p90,
        "min": ordered[0],
        "n": len(ordered),
        "spread": (p90 - ordered[0]) / p50 if p50 else 0.0,
    }


def describe_timings(taken: Timings) -> dict[str, Any]:
    """`summarize` with the process's CPU time (median) beside it, null where it was not taken."""
    cpu = None if taken.cpu_seconds is None else summarize(taken.cpu_seconds)["p50"]
    return {**summarize(taken.seconds), "cpu_p50": cpu, "method": taken.method}


def _captured(device: torch.device, call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """`call` as the replay of a CUDA graph, or itself where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        # Libraries set themselves up on a stream's first use, which a capture forbids.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize(device)
        return call, "CUDA events"
    return graph.replay, "CUDA graph"


def _between_events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _percentile(ordered: list[float], percent: int) -> float:
    """The nearest-rank percentile: a time that was really taken."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
