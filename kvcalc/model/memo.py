"""Answers about one object, kept by its identity: many questions of one model share most of their parts.

A ModelSpec holds a mapping, so it has no hash and `functools.lru_cache` cannot take it. It is never changed once made,
so that its identity stands for it. What is kept is bounded, and forgotten as a whole: something kept by
one function may be the key of another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")

_MOST_KEPT = 16_384

_kept: dict[tuple[Any, ...], tuple[object, Any]] = {}


def remembered_of_two(function: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """`remembered` of a function whose first two arguments count by identity."""

    @wraps(function)
    def ask(*given: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        key: tuple[Any, ...] = (function, id(given[0]), id(given[1]), given[2:])
        if named:
            key = (*key, *named.items())
        found = _kept.get(key)
        if found is not None:
            answer: _Answer = found[1]
            return answer
        return _keep(key, given[:2], function(*given, **named))

    return ask


def remembered(function: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """`function`, which computes something of its first argument, asked once for each.

    The first argument counts by identity and must never change, nor what is returned; the others must be hashable, and
    few in kind: no token counts. An exception is raised anew each time.
    """

    @wraps(function)
    def ask(*given: _Asked.args, **named: _Asked.kwargs) -> _Answer:
        key: tuple[Any, ...] = (function, id(given[0]), given[1:])
        if named:
            key = (*key, *named.items())
        found = _kept.get(key)
        if found is not None:
            answer: _Answer = found[1]
            return answer
        return _keep(key, given[0], function(*given, **named))

    return ask


def forget() -> None:
    """Forget everything, and let go of the objects it was about."""
    _kept.clear()


def _keep(key: tuple[Any, ...], about: object, answer: _Answer) -> _Answer:
    if len(_kept) >= _MOST_KEPT:
        forget()
    # The objects are kept too: while they live no other can have their identity.
    _kept[key] = (about, answer)
    return answer
