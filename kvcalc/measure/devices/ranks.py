"""The position of this process among those that torchrun started. This module does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.records import NamedTuple


class Place(NamedTuple):
    """This process's `rank` among `size` on all nodes, and its `local_rank` among `local_size` on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def speaks(self) -> bool:
        """Whether this process reports errors that occur in every process of this node."""
        return self.local_rank == 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place given by torchrun's variables, or a single process if they are not set.

    Only a process with MASTER_ADDR and WORLD_SIZE counts as started by torchrun, because other tools also set RANK.
    Raises UsageError (exit 2) if a variable is not a number, or if the numbers contradict each other.
    Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    if "MASTER_ADDR" not in environment or "WORLD_SIZE" not in environment:
        return Place()
    size, rank = _number(environment, "WORLD_SIZE", 1), _number(environment, "RANK", 0)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
    place = Place(rank, size, _number(environment, "LOCAL_RANK", rank % max(local_size, 1)), local_size)
    if not (place.rank < place.size >= place.local_size > place.local_rank):
        raise UsageError(
            f"RANK {place.rank}, WORLD_SIZE {place.size}, LOCAL_RANK {place.local_rank} and LOCAL_WORLD_SIZE "
            f"{place.local_size} contradict each other",
            "start the processes with torchrun, which sets these variables",
        )
    return place


def check_size(place: Place, tensor_parallel_size: int) -> None:
    """Raise UsageError (exit 2) unless there is one process for each device of --tp."""
    if place.size == tensor_parallel_size:
        return
    if tensor_parallel_size == 1:
        raise UsageError(
            f"{place.size} processes but no --tp",
            f"use --tp {place.size} to split the heads over them, or unset WORLD_SIZE to run a single process",
        )
    processes = "there is 1 process" if place.size == 1 else f"there are {place.size} processes"
    raise UsageError(
        f"--tp {tensor_parallel_size} needs {tensor_parallel_size} processes, but {processes}",
        f"torchrun --nproc-per-node {tensor_parallel_size} -m kvcalc measure ... --tp {tensor_parallel_size}",
    )


def leave(status: int) -> None:
    """Exit immediately with `status` if torchrun started this process. Return if it is the only process.

    A normal interpreter exit is not safe. During finalization, threads of torch.distributed that need the interpreter
    are forced to exit, and C++ then sometimes aborts the process, even after a successful run
    (https://docs.python.org/3/c-api/init.html, "Cautions regarding runtime finalization").
    """
    try:
        alone = find_place().size == 1
    except KvcalcError:
        return
    if not alone:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


class RankError(KvcalcError):
    """An error in one of several processes. It has the exit code of the original error.

    `is_quiet` is true if another process reports it.
    """

    def __init__(self, error: KvcalcError, place: Place, is_quiet: bool = False) -> None:
        super().__init__(f"rank {place.rank} of {place.size}: {error.message}", error.hint)
        self.exit_code = error.exit_code
        self.is_quiet = is_quiet


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{name}={text[:40]!r} in the environment is not a number", "unset it if you do not use torchrun"
        )
    return int(text)
