"""Run a function over several items, on several cores if the platform can fork."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# What forked processes inherit: a closure cannot be sent to them.
_inherited: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []


def each(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """The results of `function` for each item, in order. `jobs` is the number of processes; None is one for each core.

    `progress` is called with the number of results, and of items. Results are sent between processes, so they must be
    plain data. Raises what `function` raises.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    if jobs < 2 or not hasattr(os, "fork"):
        return _counted(map(function, items), len(items), progress)
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    _inherited.append((function, items))
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            return _counted(pool.map(_call, range(len(items))), len(items), progress)
    finally:
        _inherited.pop()


def _counted(results: Iterable[Result], of: int, progress: Callable[[int, int], None] | None) -> list[Result]:
    done: list[Result] = []
    for result in results:
        done.append(result)
        if progress is not None:
            progress(len(done), of)
    return done


def _call(place: int) -> Any:
    function, items = _inherited[-1]
    return function(items[place])
