"""Which of the processes torchrun started this one is. Nothing here imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from kvcalc.errors import KvcalcError, UsageError


class Place(NamedTuple):
    """This process among those started together: rank of size over all nodes, local_rank of local_size on this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def speaks(self) -> bool:
        """Whether what goes wrong alike in every process of this node is this one's to report."""
        return self.local_rank == 0


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place torchrun's variables name; alone where they are not set.

    Only a process with MASTER_ADDR and WORLD_SIZE counts as started so: RANK alone is set by other tools too.
    Raises UsageError (exit 2) where a variable is no number, or the numbers contradict each other.
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
            "torchrun sets them",
        )
    return place


def check_size(place: Place, tensor_parallel_size: int) -> None:
    """Raise UsageError (exit 2) unless there is one process per device that --tp asks for."""
    if place.size == tensor_parallel_size:
        return
    if tensor_parallel_size == 1:
        raise UsageError(
            f"{place.size} processes and no --tp",
            f"--tp {place.size} shards the heads over them; unset WORLD_SIZE to run alone",
        )
    there = "there is 1 process" if place.size == 1 else f"there are {place.size} processes"
    raise UsageError(
        f"--tp {tensor_parallel_size} takes {tensor_parallel_size} processes, and {there}",
        f"torchrun --nproc-per-node {tensor_parallel_size} -m kvcalc measure ... --tp {tensor_parallel_size}",
    )


def leave(status: int) -> None:
    """End a process that torchrun started at once, with `status`; return where it is the only one.

    Not through the interpreter's own end: threads of torch.distributed that want the interpreter back while it is
    being torn down are made to exit by it, which C++ answers by aborting the process, now and then, after a run that
    went well (https://docs.python.org/3/c-api/init.html, "Cautions regarding runtime finalization").
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
    """What went wrong in one process of several, with the exit code of the error it was.

    `is_quiet`: another process reports it.
    """

    def __init__(self, error: KvcalcError, place: Place, is_quiet: bool = False) -> None:
        super().__init__(f"rank {place.rank} of {place.size}: {error.message}", error.hint)
        self.exit_code = error.exit_code
        self.is_quiet = is_quiet


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    text = environment.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{name}={text[:40]!r} in the environment is no number", "torchrun sets it; unset it otherwise"
        )
    return int(text)
