"""Streams, events and graphs of the simulated device, and the rules of a capture.

Source: "CUDA Graphs" in torch's CUDA semantics (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs), and
"Prohibited and Unhandled Operations" in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.simulated_cuda.machine import Allocation, Captured, Machine, machine


class CaptureError(RuntimeError):
    """What CUDA's error is in torch: a RuntimeError with CUDA's message."""


class Stream:
    """torch.cuda.Stream. All streams share one timeline."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        index = torch.device("cuda" if device is None else device).index if not isinstance(device, int) else device
        self.device = torch.device("cuda", machine().current_device if index is None else index)
        self.cuda_stream = id(self)

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        machine().wait("Stream.synchronize")

    def query(self) -> bool:
        machine().refuse_in_capture("Stream.query")
        return machine().host >= machine().device


class StreamContext:
    """torch.cuda.stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            machine().streams.append(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            machine().streams.pop()


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.has_timing, self.at = enable_timing, -1.0

    def record(self, stream: Stream | None = None) -> None:
        made = machine()
        if made.capture is None:
            # The device reaches the event when its earlier work is done.
            self.at = made.device = max(made.host, made.device)

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        machine().refuse_in_capture("Event.query")
        return machine().host >= self.at

    def synchronize(self) -> None:
        made = machine()
        made.refuse_in_capture("Event.synchronize")
        made.syncs["Event.synchronize"] += 1
        made.host = max(made.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events, which must have been recorded with timing, and reached."""
        if not (self.has_timing and end.has_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at < 0 or end.at < 0:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if machine().host < end.at:
            raise RuntimeError("CUDA error: device not ready")
        return (end.at - self.at) * 1e3


class Node(NamedTuple):
    """One kernel of a graph: its name, its seconds, what repeats it, and the blocks that it reads from outside."""

    name: str
    seconds: float
    again: Callable[[], object]
    outside: list[weakref.ref[Allocation]]


class Graph:
    """torch.cuda.CUDAGraph: records kernels during a capture, and repeats them in `replay`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Node] = []
        self.own: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self.failure: str | None = None
        self.replays = 0
        self.is_captured = False
        self.stream: Stream | None = None
        machine().graphs.add(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        made = machine()
        if made.capture is not None:
            raise RuntimeError("cudaStreamBeginCapture: a capture is already under way")
        made.capture, self.stream = self, made.streams[-1] if made.streams else None
        if self.stream is None:
            made.capture = None
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")

    def capture_end(self) -> None:
        made = machine()
        made.capture = None
        made.captures.append(Captured([node.name for node in self.nodes], self.failure))
        if self.failure is not None:
            made.is_allocator_broken |= made.capture_breaks_allocator
            raise CaptureError(f"CUDA error: operation failed due to a previous error during capture ({self.failure})")
        self.is_captured = True

    def fail(self, why: str) -> None:
        """Invalidate the capture. The call that is not permitted raises too."""
        self.failure = self.failure or why
        raise CaptureError(f"CUDA error: operation not permitted when stream is capturing ({why})")

    def record(
        self, made: Machine, name: str, seconds: float, again: Callable[[], object], read: list[Allocation]
    ) -> None:
        """Add a kernel. It must be on the stream that captures."""
        if (made.streams[-1] if made.streams else None) is not self.stream:
            self.fail(f"{name} on another stream")
        self.nodes.append(Node(name, seconds, again, [weakref.ref(block) for block in read if block not in self.own]))

    def replay(self) -> None:
        """Launch the graph. Its kernels run again over the memory that they were captured with."""
        made = machine()
        if not self.is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        made.refuse_in_capture("CUDAGraph.replay")
        self.replays += 1
        made.launches["graph"] += 1
        made.host += made.launch_seconds
        made.device = max(made.device, made.host)
        for node in self.nodes:
            if any(block() is None for block in node.outside):
                raise AssertionError(f"the graph's {node.name} reads memory that was freed after the capture")
            node.again()
            made.device += node.seconds

    def reset(self) -> None:
        self.nodes.clear()
        self.is_captured = False

    def pool(self) -> tuple[int, int]:
        return (0, id(self))
