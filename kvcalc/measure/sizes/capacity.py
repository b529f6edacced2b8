"""`--until-full`: find the largest context or batch that really fits by bisection, and compare it with the prediction.

A size fits if the weights, caches of that size with every row written, and one decode step stay within the limit. On
CUDA, the allocator reports that memory is full. On a CPU, the allocator would not fail before the system kills the
process. So there the peak memory of the process is compared with the limit, and caches that exceed the limit on their
own are not created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from kvcalc.attention.cache import TokenCache
from kvcalc.errors import DoesNotFitError, KvcalcError, RunError, UsageError
from kvcalc.measure.devices.device import MemoryWatch, free_bytes, release
from kvcalc.measure.devices.faults import explain
from kvcalc.measure.layers.stack import Report, Request, Stack, build, inputs, make_caches
from kvcalc.measure.layers.storage import Storage
from kvcalc.measure.sizes.budget import predicted_bytes, usable_bytes, weights_bytes_of
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.model.spec import ModelSpec
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

AXES = ("context", "batch")
# The result is exact to one part in this many.
_RESOLUTION = 128
_MOST_TOKENS, _MOST_SEQUENCES = 1 << 40, 1 << 30


def check_axis(axis: str, ranks: int, is_swept: bool, storage: Storage) -> None:
    """Raise UsageError (exit 2) for options that --until-full does not support."""
    if axis not in AXES:
        raise UsageError(f"--until-full {axis[:40]!a}: one of {', '.join(AXES)}")
    if ranks > 1 or is_swept or storage.kind != "preallocated":
        raise UsageError("--until-full needs one device and a preallocated cache, and cannot be combined with --sweep")


def find_capacity(
    spec: ModelSpec, request: Request, axis: str, memory_bytes: int | None, progress: Report
) -> documents.Capacity:
    """The `capacity` part of a document: {"axis", "limit_bytes", "predicted", "measured", "ratio", "trials"}.

    Raises DoesNotFitError (exit 4) if not even one token or sequence fits.
    """
    device, limit = request.device, usable_bytes(free_bytes(request.device), request.device.type)
    if memory_bytes is not None:
        if memory_bytes > limit:
            raise DoesNotFitError(
                f"--memory {format_size(memory_bytes)} is more than a run may use on this machine, "
                f"{format_size(limit, capacity=True)}"
            )
        limit = memory_bytes
    weights = weights_bytes_of(spec, request.dtype)

    def at(size: int) -> Request:
        return request._replace(context_tokens=size) if axis == "context" else request._replace(batch_size=size)

    def needed(size: int) -> int:
        return weights + predicted_bytes(spec, at(size))

    most = _MOST_TOKENS if axis == "context" else _MOST_SEQUENCES
    least = 2 if axis == "context" else 1
    predicted = most_that_fit(lambda n: needed(max(n, least)), limit, most)
    if predicted == most - 1:
        raise RunError(f"--until-full {axis}: the cache does not grow, so any number fits")
    trials = 0

    def fits(size: int) -> bool:
        nonlocal trials
        trials += 1
        progress(f"until full: {size:,}", trials, 16)
        return needed(size) <= limit and _fits(spec, at(size), limit)

    with _limited(device, limit if memory_bytes is not None else None):
        measured = _bisect(fits, least, predicted)
    if not measured:
        raise DoesNotFitError(f"--until-full {axis}: not even {least} fits in {format_size(limit, capacity=True)}")
    return {
        "axis": cast(Any, axis),
        "limit_bytes": limit,
        "predicted": predicted,
        "measured": measured,
        "ratio": measured / predicted,
        "trials": trials,
    }


def _bisect(fits: Callable[[int], bool], least: int, predicted: int) -> int:
    """The largest size that fits, to one part in _RESOLUTION, or 0 if none fits. The search starts at `predicted`."""
    low, high = 0, max(predicted, least)
    while fits(high):
        low, high = high, high + max(1, high // 8)
    while high - low > max(1, low // _RESOLUTION):
        middle = max(least, (low + high) // 2)
        if middle in (low, high):
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _fits(spec: ModelSpec, request: Request, limit: int) -> bool:
    """Whether one step with full caches of this size stays within `limit` bytes."""
    watch = MemoryWatch(request.device)
    stack: Stack | None = None
    try:
        with torch.inference_mode():
            stack = build(spec, request, lambda what, done, of: None)
            make_caches(stack, request)
            for cache in stack.caches:
                for tensor in (*cache.tensors, *cache.scales):
                    tensor.zero_()
                if isinstance(cache, TokenCache) and not cache.length:
                    cache.length = request.context_tokens - 1
            stack.run(inputs(spec, request)(1))
        peak = watch.describe()["peak_bytes"]
        return peak is None or peak <= limit
    except (RuntimeError, MemoryError) as error:
        fault = error if isinstance(error, KvcalcError) else explain(error)
        if fault is None or "out of memory" not in str(fault):
            raise
        return False
    finally:
        if stack is not None:
            stack.clear()
        release(request.device)


@contextmanager
def _limited(device: torch.device, limit: int | None) -> Iterator[None]:
    """Limit a CUDA device's allocator to `limit` bytes more inside the block. None means no limit."""
    if device.type != "cuda" or limit is None:
        yield
        return
    # Kernel libraries keep their workspaces for the next run.
    limit += torch.cuda.memory_allocated(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info(device)[1]), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
