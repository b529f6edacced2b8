"""`simulated_cuda`: replaces the parts of torch that need a driver.

What torch.cuda checks in Python runs as it is, above the replaced bindings: a real device refuses the same arguments.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.cuda.nccl
import torch.distributed
import torch.profiler

from tests.simulated_cuda import graphs
from tests.simulated_cuda.kernels import compiled
from tests.simulated_cuda.machine import Machine, Memory, describe, start, stop
from tests.simulated_cuda.tensors import Dispatch, Functions, SimulatedTensor, finish

_SUM = "c10d::allreduce_"


@contextlib.contextmanager
def simulated_cuda(made: Machine | None = None, **options: Any) -> Iterator[Machine]:
    """Inside the block, this process has the CUDA devices of `made`, or of `Machine(**options)`."""
    made = made or Machine(**options)
    start(made)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, function in _functions(made).items():
                patch.setattr(torch.cuda, name, function, raising=False)
            patch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1), raising=False)
            patch.setattr(torch, "compile", compiled)
            patch.setattr(torch.profiler, "profile", functools.partial(_profile, torch.profiler.profile))
            patch.setattr(torch.cuda.graph, "default_capture_stream", None)
            for name, function in _collectives(made).items():
                patch.setattr(torch.distributed, name, function)
            for name, function in _bindings(made).items():
                patch.setattr(torch._C, name, function, raising=False)
            patch.setattr(torch.version, "cuda", "13.0")
            patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
            patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
            patch.setattr(time, "perf_counter", lambda: made.host)
            with Functions(), Dispatch():
                yield made
    finally:
        stop()


def _collectives(made: Machine) -> dict[str, Any]:
    """torch.distributed with NCCL for the device's tensors, if `made` has it. gloo carries both kinds.

    NCCL's communicators wait for all graphs with their operations before they end
    (https://docs.nvidia.com/dl-cuda-graph/troubleshooting/process-hang.html).
    """
    collectives = torch.distributed
    start, end, reduce = (
        collectives.init_process_group, collectives.destroy_process_group, collectives.all_reduce,
    )  # fmt: skip
    asked = [""]

    def init_process_group(backend: str, **options: Any) -> None:
        assert made.has_nccl or "nccl" not in backend
        asked[0] = backend if ":" in backend else f"cpu:{backend},cuda:{backend}"
        start("gloo", **options)

    def destroy_process_group(group: Any = None) -> None:
        alive = [graph for graph in made.graphs if _SUM in (node.name for node in graph.nodes)]
        assert not alive, "destroy_process_group hangs, because graphs with its operations still exist"
        end(group)

    def all_reduce(tensor: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(tensor, SimulatedTensor) or made.capture is None:
            return reduce(tensor, *given, **named)
        if not made.has_nccl:
            made.wait("a copy by gloo")
        # A capture sends nothing. The graph does when it is launched.
        finish(_SUM, [tensor], tensor.on_cpu, tensor.number, True, lambda: reduce(tensor.on_cpu, *given, **named))
        return None

    return {
        "all_reduce": all_reduce,
        "is_nccl_available": lambda: made.has_nccl,
        "init_process_group": init_process_group,
        "get_backend_config": lambda group=None: asked[0],
        "destroy_process_group": destroy_process_group,
    }


def _profile(profile: Any, *, activities: Any = None, **options: Any) -> Any:
    """torch.profiler.profile, without the device's own events, which need a driver."""
    return profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def _bindings(made: Machine) -> dict[str, Any]:
    """The bindings in torch._C, below the checks that torch.cuda makes of its arguments, for the devices of `made`."""

    def memory(index: int) -> Memory:
        _check_ordinal(made, index)
        return made.devices[index]

    def set_device(index: int) -> None:
        _check_ordinal(made, index)
        made.current_device = index

    def set_fraction(fraction: float, index: int) -> None:
        memory(index).limit = int(memory(index).total * fraction)

    def reset_peak(index: int) -> None:
        memory(index).peak = memory(index).allocated

    def empty_cache() -> None:
        if made.is_allocator_broken:
            raise RuntimeError('captures_underway.empty() INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"')
        for each in made.devices:
            each.trim()

    def set_sync_debug_mode(mode: int) -> None:
        if mode:
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        made.sync_is_error = mode == 2

    return {
        "_cuda_getDevice": lambda: made.current_device,
        "_cuda_setDevice": set_device,
        "_cuda_synchronize": lambda: made.wait("synchronize"),
        "_cuda_memoryStats": lambda index: memory(index).stats(),
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_emptyCache": empty_cache,
        "_cuda_set_sync_debug_mode": set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": lambda: 2 if made.sync_is_error else 0,
        "_host_emptyCache": lambda: None,
    }


def _check_ordinal(made: Machine, index: int) -> None:
    if not 0 <= index < len(made.devices):
        raise RuntimeError("CUDA error: invalid device ordinal")


def _functions(made: Machine) -> dict[str, Any]:
    """The functions and classes of torch.cuda that ask the driver at once, for the devices of `made`."""

    def exchange_device(index: int) -> int:
        before = made.current_device
        if index >= 0:
            torch.cuda.set_device(index)
        return before

    def sleep(cycles: int) -> None:
        made.launches["sleep"] += 1
        made.device = max(made.device, made.host) + cycles / 1.98e9

    def memory_info(index: int) -> tuple[int, int]:
        _check_ordinal(made, index)
        return made.devices[index].free, made.devices[index].total

    default = graphs.Stream(0)
    return {
        "is_available": lambda: True,
        "_initialized": True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "device_count": lambda: len(made.devices),
        "cudart": lambda: SimpleNamespace(cudaMemGetInfo=memory_info),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "_get_device_properties": lambda index: describe(made, index),
        "_sleep": sleep,
        "Event": graphs.Event,
        "Stream": graphs.Stream,
        "stream": graphs.StreamContext,
        "current_stream": lambda device=None: made.streams[-1] if made.streams else default,
        "default_stream": lambda device=None: default,
        "CUDAGraph": graphs.Graph,
        "is_current_stream_capturing": lambda: made.capture is not None,
    }
