"""Capture a call into a CUDA graph, whose replay launches all its kernels at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kvcalc.errors import RunError
from kvcalc.measure.faults import first_line


class Replay(NamedTuple):
    """What is timed: `call`, how its time is measured, and the reason if it could not be captured into a graph."""

    call: Callable[[], object]
    method: str
    reason: str | None = None


def capture(device: torch.device, call: Callable[[], object]) -> Replay:
    """`call` as the replay of a CUDA graph, or `call` itself and the reason if it cannot be captured.

    Raises RunError (exit 1) if the failed capture has left torch's allocator unusable, as it does up to torch 2.11
    (https://github.com/pytorch/pytorch/issues/180395). Only a new process can then go on.
    """
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        # A failed capture leaves its own stream as the current one, so the stream is set back here.
        with torch.cuda.stream(torch.cuda.current_stream(device)):
            # Libraries initialise on the first use of a stream, which is not allowed during a capture.
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(graph):
                call()
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _check_allocator(device, error)
        return Replay(call, "CUDA events", first_line(error)[:200])
    return Replay(graph.replay, "CUDA graph")


def _check_allocator(device: torch.device, failure: RuntimeError) -> None:
    try:
        torch.cuda.synchronize(device)
        torch.empty(1 << 20, device=device)
        torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RunError(
            f"a failed CUDA graph capture has left torch's allocator unusable: {first_line(failure)[:200]}",
            "run it again with another --backend, or with a newer torch",
        ) from error
