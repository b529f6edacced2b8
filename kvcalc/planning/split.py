"""The layers of a model on several devices, as llama.cpp divides them: what each device holds, and whether it fits.

The devices have the same memory, but not the same layers, so each has its own room for the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from kvcalc.memory.engines import Engine
from kvcalc.memory.sharding import stages_of
from kvcalc.planning.capacity import capacity
from kvcalc.planning.case import Case

if TYPE_CHECKING:
    from kvcalc.planning.budget import Budget


def split_budgets(case: Case, sizes: list[int], divide: Callable[[Case, int], Budget]) -> tuple[Budget, ...]:
    """The budget of every device. `sizes` has the bytes of the weights on each, and `divide` gives a budget."""
    stages = stages_of(case.share, case.rules.bounds)
    rules = _undivided(case.rules)
    return tuple(divide(case._replace(share=stage, rules=rules), size) for stage, size in zip(stages, sizes))


def tightest(budgets: tuple[Budget, ...]) -> Budget:
    """The budget of the device with the least free memory."""
    return min(budgets, key=_free)


def memory_of_devices(case: Case, budgets: tuple[Budget, ...]) -> Callable[[int, int], int]:
    """The memory, by context and batch, in which the largest cache of a device fits if all of them fit."""

    def at(tokens: int, sequences: int) -> int:
        largest = case.rules.batch_bytes(case.share, case.workload.kv_dtype, tokens, sequences)
        return largest + min(found.pool_at(tokens, sequences) - _held(found, tokens, sequences) for found in budgets)

    return at


def describe_devices(budgets: tuple[Budget, ...]) -> list[dict[str, Any]]:
    """The `devices` part of `fit`: a row for each device, in order. A device without layers may have the output."""
    return [
        {
            "device": number,
            "first_layer": min((group.first for group in found.case.share.layers), default=None),
            "last_layer": max((group.last for group in found.case.share.layers), default=None),
            "weights_bytes": found.weights.bytes,
            "kv_cache_bytes": _held(found, *_load(found)),
            "free_bytes": _free(found),
            "fits": _free(found) >= 0,
        }
        for number, found in enumerate(budgets)
    ]


def limits(budgets: tuple[Budget, ...]) -> list[dict[str, Any]]:
    """The `fit` part of every device by itself."""
    return [capacity(found.case, found.pool_bytes, [], found.pool_shrinkage) for found in budgets]


def _undivided(rules: Engine) -> Engine:
    """The same rules for the layers of one device."""
    found = copy(rules)
    found.bounds = ()
    return found


def _load(found: Budget) -> tuple[int, int]:
    workload = found.case.workload
    return workload.context_tokens, workload.batch_size


def _held(found: Budget, tokens: int, sequences: int) -> int:
    case = found.case
    return case.rules.batch_bytes(case.share, case.workload.kv_dtype, tokens, sequences)


def _free(found: Budget) -> int:
    return found.pool_bytes - _held(found, *_load(found))
