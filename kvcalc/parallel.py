"""Run a function over several items, on several cores if the platform can fork."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

# What forked processes inherit: a closure cannot be sent to them.
_inherited: list[tuple[Callable[[Any], Any], Sequence[Any]]] = []


def processes(jobs: int | None, items: int) -> int:
    """How many processes compute so many items if `jobs` were asked for, or one for each core if None."""
    return min(jobs or os.cpu_count() or 1, items) if hasattr(os, "fork") else 1


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
    jobs = processes(jobs, len(items))
    if jobs < 2:
        return _counted(map(function, items), len(items), progress)
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    _inherited.append((function, items))
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            return _counted(pool.map(_call, range(len(items))), len(items), progress)
    finally:
        _inherited.pop()


# The items of a group, and how many groups for each process wait to be computed.
_GROUP, _AHEAD = 16, 2


def in_groups(function: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """The results of `function` for items that may have no end, in order, computed by `jobs` processes in groups.

    Items and results are sent between processes. What `function` keeps is kept by each process alone.
    """
    if jobs < 2 or not hasattr(os, "fork"):
        yield from map(function, items)
        return
    from collections import deque
    from concurrent.futures import Future, ProcessPoolExecutor
    from itertools import islice
    from multiprocessing import get_context

    _inherited.append((lambda group: [*map(function, group)], ()))
    pool, later = ProcessPoolExecutor(jobs, mp_context=get_context("fork")), iter(items)
    pending = deque[Future[list[Result]]]()
    try:
        while group := [*islice(later, _GROUP)]:
            pending.append(pool.submit(_call_with, group))
            if len(pending) > _AHEAD * jobs:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        _inherited.pop()


def _call_with(item: Any) -> Any:
    return _inherited[-1][0](item)


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
