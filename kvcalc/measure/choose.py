"""Choose the backend for a layer's decode step.

Every candidate is compared with fp32 and timed on the cache that is measured, at its shape, length and dtype. The
record has every backend with its time, or with the reason why it was not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends import BACKENDS, Backend, Case
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.errors import BrokenDeviceError, KvcalcError, RunError
from kvcalc.measure.devices.device import release
from kvcalc.measure.devices.faults import first_line, forget
from kvcalc.measure.devices.timing import Effort, prepare, time_calls
from kvcalc.measure.layers.build import AttentionLayer
from kvcalc.measure.reference import aimed_query, attend_in_fp32, relative_error
from kvcalc.records import NamedTuple

# The largest error of a head's output, relative to its norm. It covers the rounding of scores in each type, and a
# different order of summation. A kernel that leaves out a token at which a head aims is off by more than half.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# A backend is timed this many times, or until the total reaches this many seconds.
_REPEATS, _SECONDS_EACH = 5, 0.3


# A backend that compiles for each shape, and takes this many times the fastest one's time, is not tried again.
_MUCH_SLOWER = 1.5


class CannotRunError(RunError):
    """The backend that was asked for by name cannot run a layer's step here."""


class SlowBackends:
    """The backends that were too slow at one context to be compiled for another one.

    They are kept for each `sort` of steps: a case and a batch, with or without a window.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[Hashable, str], str] = {}

    def why_not(self, sort: Hashable, backend: Backend) -> str | None:
        """The reason why `backend` is not compiled for another context, or None if it is."""
        return self._reasons.get((sort, backend.name))

    def learn(self, sort: Hashable, rows: list[dict[str, Any]]) -> None:
        """`rows` are the times of all backends at one context."""
        taken = {row["name"]: row["seconds"] for row in rows if row["seconds"] is not None}
        for name, seconds in taken.items():
            times = seconds / min(taken.values())
            if BACKENDS[name].compiles_each_shape and times > _MUCH_SLOWER:
                reason = f"compiles for each context, and took {times:.1f} times the fastest at another one"
                self._reasons[sort, name] = reason


class Choice(NamedTuple):
    """The chosen backend, and for every backend {"name", "seconds", "relative_error", "reason"}."""

    backend: Backend
    rows: list[dict[str, Any]]


def case_of(layer: AttentionLayer, cache: TokenCache, query: Tensor) -> Case:
    """The case that a backend has to run for `layer`."""
    key = query.device, query.dtype, layer.num_heads
    kept = cache.layout, cache.stored_dtype
    if isinstance(layer, GroupedAttention):
        return Case(*key, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, *kept, False, cache.is_ragged)
    if layer.expands:
        widths = layer.nope + layer.rope_width, layer.v_head_dim
        return Case(*key, layer.num_heads, *widths, is_ragged=cache.is_ragged)
    return Case(*key, 1, layer.rank + layer.rope_width, layer.rank, *kept, True, cache.is_ragged)


def choose(
    layer: AttentionLayer, cache: TokenCache, query: Tensor, flush: Callable[[], object], name: str = "auto",
    without: Collection[str] = (), effort: Effort = Effort(), slow: SlowBackends | None = None,
) -> Choice:  # fmt: skip
    """Check and time the backends that can run `layer`'s step over `cache`, and choose the fastest one, or `name`.

    `auto` does not run the backends called `without`, nor those in `slow`, which learns from this comparison.

    `query` has the shape that `layer.attend` takes, and `flush` is a `flusher`. A backend that fails in any way is not
    used, and its row says why.
    Raises CannotRunError (exit 1) if the backend called `name` cannot run here or gives wrong results, and
    BrokenDeviceError (exit 1), which names the backend, if nothing can run here after it.
    """
    case = case_of(layer, cache, query)
    sort = case, query.shape[0], cache.capacity < cache.max_tokens
    slow = SlowBackends() if slow is None else slow
    # A step that concatenates its cache has new addresses each time, and cannot be a graph.
    may_capture = cache.layout != "growing"
    aimed = aimed_query(layer, query, cache)
    expected = attend_in_fp32(layer, aimed, cache)
    rows: list[dict[str, Any]] = []
    best: tuple[bool, float, Backend] | None = None
    before = layer.core
    for backend in BACKENDS.values():
        row: dict[str, Any] = {"name": backend.name, "seconds": None, "relative_error": None, "reason": None}
        rows.append(row)
        if backend.name in without:
            row["reason"] = "left out (--without-backend)"
        elif name in ("auto", backend.name):
            unasked = backend.why_not_unasked(case) or slow.why_not(sort, backend)
            row["reason"] = (unasked if name == "auto" else None) or backend.why_not(case)
        else:
            row["reason"] = f"not selected (--backend {name})"
        if row["reason"]:
            continue
        try:
            layer.core = backend
            error = relative_error(layer.attend(aimed, cache), expected)
            row["relative_error"] = error if math.isfinite(error) else None
            if not error <= TOLERANCES[query.dtype]:
                row["reason"] = f"differs from fp32 by {error:.2g} of the output"
                continue
            replay = prepare(query.device, lambda: layer.attend(query, cache), may_capture)
            taken = time_calls(query.device, replay, _REPEATS, flush, most_seconds=_SECONDS_EACH, effort=effort)
            # The fastest of a few calls depends less on what else the machine does than their median.
            row["seconds"] = min(taken.seconds)
        except BrokenDeviceError as error:
            error.backend = backend.name
            raise
        except KvcalcError:
            raise
        except Exception as error:  # a kernel that fails here, in whichever way, is not used
            # Keep its own message, but not the memory of its frames.
            row["reason"] = first_line(error)[:200]
            forget(error, is_over=True)
            release(query.device)
            continue
        finally:
            layer.core = before
        # If a kernel cannot be captured, the whole step cannot, and its time includes all launches.
        rank = (replay.reason is not None, row["seconds"], backend)
        if best is None or rank[:2] < best[:2]:
            best = rank
    if best is None and without:
        raise RunError(f"no kernel is left to run without {', '.join(sorted(without))}", "use fewer --without-backend")
    if best is None:
        reason = next((row["reason"] for row in rows if row["name"] == name), rows[0]["reason"])
        raise CannotRunError(f"--backend {name} cannot run here: {reason}", "use --backend auto to choose one that can")
    slow.learn(sort, rows)
    return Choice(best[2], rows)
