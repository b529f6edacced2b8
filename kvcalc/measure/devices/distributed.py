"""The processes of a tensor-parallel run: joining them, summing over them, and handling the loss of a process.

torchrun starts the processes and sets the rendezvous address. CPUs communicate with gloo, and CUDA devices with NCCL.
Data other than device tensors always uses gloo.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvcalc.errors import KvcalcError, RunError, UsageError
from kvcalc.measure.devices.faults import first_line
from kvcalc.measure.devices.ranks import Place, RankError
from kvcalc.measure.devices.signals import heard
from kvcalc.measure.layers.build import AttentionLayer, build_layer
from kvcalc.measure.layers.sharding import copy_share, share_of_shape
from kvcalc.model.mixers.attention import AttentionShape

# The longest wait for another rank. A dead rank is noticed at once, because its connection closes. This timeout is for
# a rank that hangs. It is longer than the differences between ranks that build the largest models.
TIMEOUT_SECONDS = 300

T = TypeVar("T")


class Group:
    """The ranks of a run, or only this process. All ranks must make the same calls in the same order."""

    def __init__(self, place: Place = Place()) -> None:
        self.place = place
        self.rank, self.size = place.rank, place.size
        self.captures = place.size == 1 or "cuda:nccl" in dist.get_backend_config()
        """Whether a CUDA graph can have the sums over ranks. gloo copies them through the host."""

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.size > 1:
            # Reduce one number with gloo. NCCL's own barrier would put work on the device that is about to be timed.
            _talk(lambda: dist.all_reduce(torch.zeros(1)))

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank. Values must be JSON data.

        They are sent as bytes in gloo tensors, because torch's all_gather_object needs numpy, which kvcalc does not
        require.
        """
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        _talk(lambda: dist.all_gather(lengths, torch.tensor([mine.numel()])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        theirs = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        _talk(lambda: dist.all_gather(theirs, padded))
        return [json.loads(bytes(data[: int(length)].tolist())) for data, length in zip(theirs, lengths)]

    def slowest(self, seconds: list[float]) -> list[float]:
        """The time of the slowest rank for every step."""
        return [max(times) for times in zip(*self.gather(seconds))]

    def first(self, value: T) -> T:
        """Rank 0's `value`, on every rank. For choices that must be the same on all ranks."""
        return self.gather(value)[0]

    def agree(self, error: KvcalcError | None) -> None:
        """If any rank has an error, raise the first rank's error on every rank. Only rank 0 reports it."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        errors = self.gather(None if error is None else (error.message, error.hint, error.exit_code))
        for rank, what in enumerate(errors):
            if what is not None:
                alike = KvcalcError(what[0], what[1])
                alike.exit_code = what[2]
                raise RankError(alike, self.place._replace(rank=rank), is_quiet=self.rank > 0)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace the values of `tensor` by their sums over all ranks, in place."""
        _talk(lambda: dist.all_reduce(tensor))
        return tensor

    def sum_outputs(self, layer: AttentionLayer) -> AttentionLayer:
        """Make `layer`, which has one rank's heads, sum its output over the ranks after the output projection."""
        if self.size > 1:
            if self.rank > 0 and layer.o_proj.bias is not None:
                layer.o_proj.bias.data.zero_()
            layer.o_proj.register_forward_hook(lambda _, __, output: self.sum(output))
        return layer

    def share_of(self, whole: AttentionLayer, shape: AttentionShape, window: int | None) -> AttentionLayer:
        """This rank's share of the layer `whole` of `shape`, with rank 0's weights. With one rank, `whole` itself."""
        if self.size == 1:
            return whole
        for parameter in whole.parameters():
            self.same(parameter.data)
        weight = whole.o_proj.weight
        share = build_layer(share_of_shape(shape, self.size), window, weight.dtype, weight.device).eval()
        copy_share(whole, share, self.rank, self.size)
        return self.sum_outputs(share)

    def same(self, tensor: Tensor) -> Tensor:
        """Replace the values of `tensor` by rank 0's, in place."""
        if self.size > 1:
            _talk(lambda: dist.broadcast(tensor, 0))
        return tensor


ALONE = Group()


@contextmanager
def join(place: Place) -> Iterator[Group]:
    """The group of the processes that torchrun started. This process is at `place`. ALONE if it is the only one.

    Errors inside the block become a RankError, which names the rank and keeps the exit code.
    """
    if place.size == 1:
        yield ALONE
        return
    try:
        with heard(place):
            _start()
            yield Group(place)
            dist.destroy_process_group()
    except RankError:
        raise
    except KvcalcError as error:
        raise RankError(error, place) from error


def device_of(device: torch.device, place: Place) -> torch.device:
    """This rank's own device of the kind of `device`, which becomes torch's current device.

    If `device` has no number, this is the device with the rank's number on this machine, or the only one that this
    process sees: SLURM and others show each process its own device. Some functions of torch.cuda take no device without
    a number, so a single process gets that of torch's current device. Raises UsageError (exit 2) if there is none.
    """
    if device.type in ("mps", "xpu") and place.size > 1:
        raise UsageError(f"--tp: ranks run on CUDA devices and CPUs, not on {device.type}", "use --device cpu")
    if device.type != "cuda":
        return device
    if device.index is None and place.size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    num_devices = torch.cuda.device_count()
    number = device.index if device.index is not None else 0 if num_devices == 1 else place.local_rank
    if number >= num_devices:
        raise UsageError(
            f"{place.local_size} processes on this machine, but {num_devices} CUDA devices",
            f"use --nproc-per-node {num_devices} or --device cpu",
        )
    own = torch.device("cuda", number)
    torch.cuda.set_device(own)
    return own


def shared_device(group: Group, device: torch.device) -> UsageError | None:
    """The error, on every rank, if two ranks have the same CUDA device. NCCL needs a device for each rank."""
    identity = None
    if group.size > 1 and device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # Older releases of torch do not report these. Then NCCL notices.
        known = [
            str(getattr(properties, name, "")) for name in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
        ]
        identity = " ".join(known) if known[0] else None
    owners: dict[str, int] = {}
    for rank, other in enumerate(group.gather(identity)):
        if other is not None and owners.setdefault(other, rank) != rank:
            return UsageError(
                f"ranks {owners[other]} and {rank} have the same CUDA device",
                f"use --device cuda and --nproc-per-node {torch.cuda.device_count()}, one process for each device",
            )
    return None


def _start() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    try:
        with _silent_stdout():
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(f"the ranks cannot connect: {_reason(error)}", "check MASTER_ADDR and MASTER_PORT") from error


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Drop what libraries print on stdout, which is for the answer. gloo reports its connections there (torch 2.8)."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def _talk(call: Callable[[], object]) -> None:
    """Run a collective operation. Raises RunError (exit 1) if another rank is lost.

    While a CUDA graph is captured, nothing is sent, so an error is the capture's and is raised as it is.
    """
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise
        raise RunError(f"lost another rank: {_reason(error)}", "see that rank's own error message") from error


def _reason(error: Exception) -> str:
    """The first line of torch's message, without the source location and the advice."""
    return re.sub(r"^(\[[^\]]*\] )+", "", first_line(error)).partition(". This is typically")[0].strip().rstrip(".")
