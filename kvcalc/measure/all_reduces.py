"""The time of an all-reduce between the ranks of a profile, over the sizes of a step and of a prompt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from kvcalc.measure.devices.device import release, resolve_device
from kvcalc.measure.devices.distributed import device_of, join, shared_device
from kvcalc.measure.devices.faults import faults
from kvcalc.measure.devices.ranks import Place
from kvcalc.measure.devices.timing import Effort, summarize, time_calls

if TYPE_CHECKING:
    import kvcalc.documents as documents

# From one token of a small model to 4,096 tokens of a large one.
_BYTES = tuple(8192 << 3 * step for step in range(5))
_CALLS = 10


def time_all_reduces(device: str, place: Place, effort: Effort = Effort()) -> list[documents.MeasureProfileAllReduce]:
    """The median seconds of an all-reduce of each size between all ranks: those of the slowest rank in each call.

    Every rank must call this, and gets the same rows. Raises RunError (exit 1) if a rank is lost.
    """
    rows: list[documents.MeasureProfileAllReduce] = []
    with join(place) as group:
        where = device_of(resolve_device(device), group.place)
        group.agree(shared_device(group, where))
        with faults(where):
            for size in _BYTES:
                call = partial(group.sum, torch.zeros(size // 4, device=where))
                taken = time_calls(where, call, _CALLS, may_capture=group.captures, effort=effort, group=group)
                seconds, method = summarize(taken.seconds)["p50"], cast(Any, taken.method)
                rows.append({"ranks": group.size, "bytes": size, "seconds": seconds, "method": method})
        release(where)
    return rows
