"""The state of a simulated machine: the allocator's counts, the clocks, the launches and the capture under way."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from tests.simulated_cuda.graphs import Graph, Stream

# The allocator's rounding, and the smallest piece that it takes from the device (c10/cuda/CUDACachingAllocator.cpp,
# kMinBlockSize and kSmallBuffer).
BLOCK_BYTES, SEGMENT_BYTES = 512, 2 << 20
# What a CUDA context takes of the device's memory.
_CONTEXT_BYTES = 500 << 20


class Allocation:
    """One block of a device's memory. It lives as long as a tensor that uses it."""

    def __init__(self, device: int, requested: int) -> None:
        self.device, self.requested = device, requested
        self.size = -(-requested // BLOCK_BYTES) * BLOCK_BYTES


class Memory:
    """One device's caching allocator: bytes requested, allocated (rounded to blocks) and reserved (to segments)."""

    def __init__(self, total: int) -> None:
        self.total, self.limit = total, total
        self.requested = self.allocated = self.peak = self.reserved = self.allocations = 0
        self.out_of_memory = 0

    def take(self, block: Allocation) -> None:
        """Count a new block. Raises torch.OutOfMemoryError with CUDA's message if it does not fit."""
        if self.allocated + block.size > min(self.limit, self.total - _CONTEXT_BYTES):
            self.out_of_memory += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {block.requested / 2**20:.2f} MiB. GPU {block.device} has a "
                f"total capacity of {self.total / 2**30:.2f} GiB"
            )
        self.allocations += 1
        self.requested += block.requested
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, -(-self.allocated // SEGMENT_BYTES) * SEGMENT_BYTES)

    def give_back(self, requested: int, size: int) -> None:
        self.requested -= requested
        self.allocated -= size

    def trim(self) -> None:
        """What empty_cache does: return unused segments to the device."""
        self.reserved = -(-self.allocated // SEGMENT_BYTES) * SEGMENT_BYTES

    @property
    def free(self) -> int:
        return self.total - _CONTEXT_BYTES - self.reserved

    def stats(self) -> dict[str, int]:
        """Some entries of torch.cuda.memory_stats."""
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "active_bytes.all.current": self.allocated,
            "requested_bytes.all.current": self.requested,
            "reserved_bytes.all.current": self.reserved,
            "allocation.all.allocated": self.allocations,
            "num_alloc_retries": 0,
            "num_ooms": self.out_of_memory,
        }


class Captured(NamedTuple):
    """The end of a capture: the kernels of the graph, and what made it fail, if it failed."""

    kernels: list[str]
    failure: str | None


class Machine:
    """A machine with `device_count` equal devices, described like an H200 except for its size and its speed.

    Clocks are in seconds. `host` is the program's, and `device` the time until which the device has work. A kernel
    takes `kernel_seconds`, or the time to read and write its tensors or `multiply_seconds` if one is longer. A failed
    capture leaves the allocator unusable if `capture_breaks_allocator`, like in some releases of torch
    (https://github.com/pytorch/pytorch/issues/180395). Sums over ranks go through NCCL, or without `has_nccl` through
    gloo and the host. A scheduler may show a process other devices than the first ones of a node: `first_device`.
    """

    name = "NVIDIA H200"
    capability = (9, 0)
    num_sms = 132
    l2_bytes = 1 << 20
    bytes_per_second = 1e10
    kernel_seconds = 2e-4
    launch_seconds = 5e-6
    plan_seconds = 0.03

    def __init__(
        self, device_count: int = 1, memory_bytes: int = 8 << 30, capture_breaks_allocator: bool = False,
        has_nccl: bool = True, first_device: int = 0,
    ) -> None:  # fmt: skip
        self.devices = [Memory(memory_bytes) for _ in range(device_count)]
        self.current_device = 0
        self.capture_breaks_allocator = capture_breaks_allocator
        self.is_allocator_broken = False
        self.first_device = first_device
        self.has_nccl, self.sync_is_error = has_nccl, False
        self.host = self.device = 0.0
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.captures: list[Captured] = []
        self._plans: set[object] = set()
        self.compilations = 0
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.capture: Graph | None = None
        self.streams: list[Stream] = []
        self._blocks: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()

    def block_of(self, tensor: torch.Tensor, device: int) -> Allocation | None:
        """The block of the storage of `tensor`, which is counted when it is seen first. None if it has no bytes."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        found = self._blocks.get(storage._cdata)
        if found is None:
            memory = self.devices[device]
            found = Allocation(device, storage.nbytes())
            memory.take(found)
            self._blocks[storage._cdata] = found
            weakref.finalize(found, memory.give_back, found.requested, found.size)
            if self.capture is not None:
                self.capture.own.add(found)
        return found

    def multiply_seconds(self, flop: int, dtype: torch.dtype) -> float:
        """The seconds of `flop` operations of one kernel in `dtype`. 0, so that products take as long as reading."""
        return 0.0

    def launch(self, name: str, tensors: list[torch.Tensor], flop: int = 0) -> float:
        """Count one kernel over `tensors`, and advance the clocks. Returns the seconds that it takes on the device."""
        seconds = max(self.kernel_seconds, sum(t.numel() * t.element_size() for t in tensors) / self.bytes_per_second)
        if flop:
            seconds = max(seconds, self.multiply_seconds(flop, tensors[0].dtype))
        self.launches[name] += 1
        self.host += self.launch_seconds
        if self.capture is None:
            self.device = max(self.device, self.host) + seconds
        return seconds

    def plan(self, shapes: object) -> None:
        """cuDNN makes a plan on the host for shapes that are new."""
        if shapes not in self._plans:
            self._plans.add(shapes)
            self.host += self.plan_seconds

    def wait(self, why: str) -> None:
        """The host waits for the device. Raises what CUDA raises if a capture is under way."""
        self.refuse_in_capture(why)
        if self.sync_is_error and why != "synchronize":
            raise RuntimeError(f"called a synchronizing CUDA operation ({why})")
        self.syncs[why] += 1
        self.host = self.device = max(self.host, self.device)

    def refuse_in_capture(self, why: str) -> None:
        """Invalidate the capture under way, if there is one, and raise what CUDA raises."""
        if self.capture is not None:
            self.capture.fail(why)


_current: list[Machine] = []


def machine() -> Machine:
    """The machine that is simulated now."""
    return _current[-1]


def start(made: Machine) -> None:
    """Make `made` the machine that is simulated."""
    _current.append(made)


def stop() -> None:
    """End the simulation of the current machine."""
    _current.pop()


def describe(made: Machine, device: int) -> Any:
    """What torch.cuda.get_device_properties returns for one device of `made`."""
    from types import SimpleNamespace

    major, minor = made.capability
    number = made.first_device + device
    return SimpleNamespace(
        name=made.name, major=major, minor=minor, multi_processor_count=made.num_sms, L2_cache_size=made.l2_bytes,
        total_memory=made.devices[device].total, uuid=f"GPU-{number:032x}", gcnArchName="", is_integrated=0,
        is_multi_gpu_board=0, max_threads_per_multi_processor=2048, warp_size=32, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        pci_bus_id=number + 1, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip


def is_simulated() -> bool:
    """Whether a machine is simulated now."""
    return bool(_current)
