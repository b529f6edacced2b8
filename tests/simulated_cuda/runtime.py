"""`simulated_cuda`: replaces the parts of `torch.cuda` that need a driver."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.cuda.nccl
import torch.distributed
import torch.profiler

from tests.simulated_cuda import graphs
from tests.simulated_cuda.kernels import compiled
from tests.simulated_cuda.machine import Machine, describe, start, stop
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
            patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
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


def _functions(made: Machine) -> dict[str, Any]:
    """The functions and classes of torch.cuda, for the devices of `made`."""

    def number(device: Any = None) -> int:
        index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index
        index = made.current_device if index is None else index
        if not 0 <= index < len(made.devices):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def memory(device: Any) -> Any:
        return made.devices[number(device)]

    def set_device(device: Any) -> None:
        made.current_device = number(device)

    def set_fraction(fraction: float, device: Any = None) -> None:
        memory(device).limit = int(memory(device).total * fraction)

    def reset_peak(device: Any = None) -> None:
        memory(device).peak = memory(device).allocated

    def empty_cache() -> None:
        if made.is_allocator_broken:
            raise RuntimeError('captures_underway.empty() INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"')
        for each in made.devices:
            each.trim()

    def synchronize(device: Any = None) -> None:
        made.wait("synchronize")

    def set_sync_debug_mode(mode: Any) -> None:
        if mode not in ("default", 0):
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        made.sync_is_error = mode in ("error", 2)

    def sleep(cycles: int) -> None:
        made.launches["sleep"] += 1
        made.device = max(made.device, made.host) + cycles / 1.98e9

    default = graphs.Stream(0)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "device_count": lambda: len(made.devices),
        "current_device": lambda: made.current_device,
        "set_device": set_device,
        "get_device_name": lambda device=None: made.name if number(device) >= 0 else "",
        "get_device_capability": lambda device=None: made.capability,
        "get_device_properties": lambda device=None: describe(made, number(device)),
        "mem_get_info": lambda device=None: (memory(device).free, memory(device).total),
        "memory_allocated": lambda device=None: memory(device).allocated,
        "memory_reserved": lambda device=None: memory(device).reserved,
        "max_memory_allocated": lambda device=None: memory(device).peak,
        "max_memory_reserved": lambda device=None: memory(device).reserved,
        "memory_stats": lambda device=None: memory(device).stats(),
        "reset_peak_memory_stats": reset_peak,
        "set_per_process_memory_fraction": set_fraction,
        "empty_cache": empty_cache,
        "synchronize": synchronize,
        "_sleep": sleep,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: 2 if made.sync_is_error else 0,
        "Event": graphs.Event,
        "Stream": graphs.Stream,
        "stream": graphs.StreamContext,
        "current_stream": lambda device=None: made.streams[-1] if made.streams else default,
        "default_stream": lambda device=None: default,
        "CUDAGraph": graphs.Graph,
        "is_current_stream_capturing": lambda: made.capture is not None,
    }
