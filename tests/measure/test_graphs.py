"""Capturing a call into a CUDA graph, on a simulated device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from kvcalc.errors import RunError
from kvcalc.measure.devices.graphs import Replay, capture
from tests.simulated_cuda import simulated_cuda

CUDA = torch.device("cuda")


def on_another_stream(x: Tensor) -> None:
    """Work that CUDA only refuses during the capture."""
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


def test_a_replay_repeats_the_call() -> None:
    with simulated_cuda() as machine:
        x = torch.zeros(3, device=CUDA)
        replay = capture(CUDA, lambda: x.add_(1))
        assert (replay.method, replay.reason) == ("CUDA graph", None)
        before = x.tolist()
        replay.call()
        assert x.tolist() == [value + 1 for value in before]
        assert machine.captures[-1].kernels == ["add_"]


def test_a_call_that_waits_is_found_before_the_capture() -> None:
    with simulated_cuda() as machine:
        x = torch.ones(3, device=CUDA)
        replay = capture(CUDA, lambda: x.sum().item())
        assert replay.method == "CUDA events"
        assert "called a synchronizing CUDA operation" in (replay.reason or "")
        assert machine.captures == []
        assert torch.cuda.get_sync_debug_mode() == 0
        assert replay.call() == 3


def test_a_capture_that_fails_says_why_and_leaves_the_stream() -> None:
    with simulated_cuda() as machine:
        x, before = torch.ones(3, device=CUDA), torch.cuda.current_stream()
        replay = capture(CUDA, lambda: on_another_stream(x))
        assert replay.method == "CUDA events"
        assert "add_ on another stream" in (replay.reason or "")
        assert len(machine.captures) == 1
        assert torch.cuda.current_stream() is before


def test_after_a_capture_that_broke_the_allocator_nothing_goes_on() -> None:
    with simulated_cuda(capture_breaks_allocator=True):
        x = torch.ones(3, device=CUDA)
        with pytest.raises(RunError, match="left torch's allocator unusable: CUDA error") as caught:
            capture(CUDA, lambda: on_another_stream(x))
        assert "another --backend" in (caught.value.hint or "")


def test_what_a_graph_reads_lives_as_long_as_its_replay() -> None:
    with simulated_cuda():

        def captured_alone() -> Replay:
            x = torch.ones(3, device=CUDA)
            return capture(CUDA, lambda: x * 2)

        replay = captured_alone()
        gc.collect()
        replay.call()
