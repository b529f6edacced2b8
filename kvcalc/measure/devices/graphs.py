"""Capture a call into a CUDA graph, whose replay launches all its kernels at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvcalc.errors import BrokenDeviceError
from kvcalc.measure.devices.distributed import ALONE, Group
from kvcalc.measure.devices.faults import first_line
from kvcalc.records import NamedTuple


class Replay(NamedTuple):
    """What is timed: `call`, how its time is measured, and the reason if it could not be captured into a graph.

    `captured` is the call in the graph. It keeps the tensors that the graph reads, which must not be freed.
    """

    call: Callable[[], object]
    method: str
    reason: str | None = None
    captured: Callable[[], object] | None = None


def capture(device: torch.device, call: Callable[[], object], group: Group = ALONE) -> Replay:
    """`call` as the replay of a CUDA graph, or `call` itself and the reason if it cannot be captured on every rank.

    Raises BrokenDeviceError (exit 1) if a failed capture has left torch's allocator unusable, as it does up to torch
    2.11 (https://github.com/pytorch/pytorch/issues/180395). Only a new process can then go on.
    """
    graph = torch.cuda.CUDAGraph()
    reason = _record(graph, device, call, group) if group.captures else "gloo copies the sums through the host"
    # Ranks wait for each other inside a graph with their sums, so each of them must launch it, or none
    # (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html).
    elsewhere = next((other for other in group.gather(reason) if other), None)
    if reason or elsewhere:
        return Replay(call, "CUDA events", reason or f"not captured on another rank: {elsewhere}"[:200])
    return Replay(graph.replay, "CUDA graph", captured=call)


def _record(graph: torch.cuda.CUDAGraph, device: torch.device, call: Callable[[], object], group: Group) -> str | None:
    """Capture `call` into `graph`. Returns the reason if that is not possible."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # NCCL's watchdog thread asks for events of earlier sums. This must not end the capture.
    mode = "thread_local" if group.size > 1 else "global"
    try:
        # A failed capture leaves its own stream as the current one, so the stream is set back here.
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            # Libraries initialise on the first use of a stream, which is not allowed during a capture.
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side), _refusing_to_wait():
                call()
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(graph, capture_error_mode=mode):
                call()
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _check_allocator(device, error)
        return first_line(error)[:200]
    return None


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Inside the block, an operation that waits for the device is an error, so that it is found before the capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch warns that it does not find all such operations. The others fail in the capture.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _check_allocator(device: torch.device, failure: RuntimeError) -> None:
    try:
        torch.cuda.synchronize(device)
        torch.empty(1 << 20, device=device)
        torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise BrokenDeviceError(
            f"a failed CUDA graph capture has left torch's allocator unusable: {first_line(failure)[:200]}",
            "run it again with another --backend, or with a newer torch",
        ) from error
