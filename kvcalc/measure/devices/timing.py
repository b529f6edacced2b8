"""Time a call many times. Every call waits until the device has finished, and no call finds its data in a cache.

- CUDA: the work is captured into a graph once (`kvcalc.measure.devices.graphs`) and replayed between two events. The
  device waits in a kernel that does nothing until the host has queued the replay, so that launches are not timed.
- CPU: wall time, and the process's CPU time.
- MPS and XPU: wall time, synchronised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch

from kvcalc.measure.devices.device import last_level_cache_bytes, synchronize
from kvcalc.measure.devices.distributed import ALONE, Group
from kvcalc.measure.devices.graphs import Replay, capture
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Above this spread, (p90 - min) / p50, a median is not reliable.
MOST_SPREAD = 0.5

# The first call sets the kernel up. A long one needs no more than one.
_WARM_UP_CALLS, _WARM_UP_SECONDS = 3, 0.1
# The flushing buffer is this many times the last-level cache. GPUs do not replace the least recently used line, so
# after reading twice the L2 some lines survive.
FLUSHED_TIMES = {"cuda": 4, "cpu": 2, "mps": 2, "xpu": 4}
# GPUs raise their clocks under load. The call is repeated for this long before it is timed.
_SETTLE_SECONDS, _MOST_SETTLING = 0.1, 5_000
# The shortest and the longest wait that covers the launch.
_COVER_SECONDS = (50e-6, 20e-3)
# The cycles of the wait that is timed to learn how long one takes. Devices count the cycles of different clocks.
_TRIED_CYCLES = 1_000_000


class Timings(NamedTuple):
    """The seconds of every call. `method` says how they were measured.

    `cpu_seconds` is the process's CPU time over all threads, only on a CPU.
    """

    seconds: list[float]
    cpu_seconds: list[float] | None
    method: str


class Effort(NamedTuple):
    """Sizes of the measurements around a run. None means as large as the device needs.

    `read_bytes` is the size of the read roof's buffer, and `matrix_width` the width of the matmul roof's matrices.
    `cache_bytes` is the size of the last-level cache, which is flushed before each timed call. `settle_seconds` is how
    long a GPU repeats the work before it is timed.
    """

    read_bytes: int | None = None
    matrix_width: int | None = None
    cache_bytes: int | None = None
    settle_seconds: float | None = None


def time_call(device: torch.device, call: Callable[[], object]) -> float:
    """The seconds of one `call`, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def flusher(device: torch.device, effort: Effort = Effort()) -> Callable[[], object]:
    """A function that flushes the device's last-level cache, to be called before each timed call.

    It reads a buffer. Writing one would leave modified lines, which the timed call would have to write back.
    """
    size = last_level_cache_bytes(device) if effort.cache_bytes is None else effort.cache_bytes
    return torch.ones(FLUSHED_TIMES[device.type] * size // 4, dtype=torch.float32, device=device).sum


def prepare(device: torch.device, call: Callable[[], object], may_capture: bool = True, group: Group = ALONE) -> Replay:
    """Warm `call` up, and capture it into a CUDA graph if this is possible on every rank and `may_capture`."""
    spent = 0.0
    for _ in range(_WARM_UP_CALLS):
        # Ranks may wait for each other inside the call, so each makes the same number of calls.
        if spent < _WARM_UP_SECONDS or group.size > 1:
            spent += time_call(device, call)
    if device.type != "cuda":
        return Replay(call, "wall clock")
    return capture(device, call, group) if may_capture else Replay(call, "CUDA events")


def time_calls(
    device: torch.device, call: Callable[[], object] | Replay, count: int, flush: Callable[[], object] | None = None,
    *, may_capture: bool = True, most_seconds: float = float("inf"), effort: Effort = Effort(), group: Group = ALONE,
) -> Timings:  # fmt: skip
    """Time `call` `count` times, or until the total reaches `most_seconds`. `call` must do the same work every time.

    All ranks of `group` start each call together, and its time is that of the slowest rank. With `may_capture` False,
    no CUDA graph is used.
    """
    replay = call if isinstance(call, Replay) else prepare(device, call, may_capture, group)
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    cover = _settle(device, replay.call, effort, group) if device.type == "cuda" else 0
    while len(seconds) < count and (not seconds or sum(seconds) < most_seconds):
        group.barrier()
        if flush is not None:
            flush()
        if device.type == "cuda":
            seconds += group.slowest([_between_events(replay.call, cover)])
            continue
        synchronize(device)
        cpu = time.process_time()
        seconds += group.slowest([time_call(device, replay.call)])
        cpu_seconds.append(time.process_time() - cpu)
    return Timings(seconds, cpu_seconds if device.type == "cpu" else None, replay.method)


def summarize(seconds: list[float]) -> dict[str, float]:
    """Median, 90th percentile (nearest rank) and minimum in seconds, the number of timings, and their spread.

    The spread is (90th percentile - minimum) / median.
    """
    ordered = sorted(seconds)
    p50, p90 = _percentile(ordered, 50), _percentile(ordered, 90)
    return {
        "p50": p50,
        "p90": p90,
        "min": ordered[0],
        "n": len(ordered),
        "spread": (p90 - ordered[0]) / p50 if p50 else 0.0,
    }


def describe_timings(taken: Timings) -> documents.Timing:
    """`summarize`, plus the median of the process's CPU time (None if not measured) and the method."""
    cpu = None if taken.cpu_seconds is None else summarize(taken.cpu_seconds)["p50"]
    return cast("documents.Timing", {**summarize(taken.seconds), "cpu_p50": cpu, "method": taken.method})


def _settle(device: torch.device, call: Callable[[], object], effort: Effort, group: Group) -> int:
    """Repeat `call` until the clocks have settled. Returns the cycles of a wait that covers its launch."""
    wanted = _SETTLE_SECONDS if effort.settle_seconds is None else effort.settle_seconds
    whole = time_call(device, call)
    # All ranks repeat the call equally often, because they may wait for each other inside it.
    end = time.monotonic() + wanted
    for _ in range(group.first(min(_MOST_SETTLING, int(wanted / max(whole, 1e-9))))):
        call()
        if group.size == 1 and time.monotonic() > end:
            break
    synchronize(device)
    start = time.perf_counter()
    call()
    queued = time.perf_counter() - start
    synchronize(device)
    seconds = max(_COVER_SECONDS[0], min(2 * queued, _COVER_SECONDS[1]))
    taken = _between_events(lambda: _wait(_TRIED_CYCLES), 0)
    return int(seconds * _TRIED_CYCLES / taken) if taken > 0 else 0


def _wait(cycles: int) -> None:
    """Queue a kernel that waits. Nothing where torch has none, because it is not public."""
    with suppress(AttributeError):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _between_events(call: Callable[[], object], cover_cycles: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    if cover_cycles:
        _wait(cover_cycles)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _percentile(ordered: list[float], percent: int) -> float:
    """The nearest-rank percentile, which is always a measured time."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
