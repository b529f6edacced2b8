"""A cache of function results, keyed by the identity of the first argument.

Questions about the same model share most of their intermediate results. A ModelSpec contains a mapping, so it is not
hashable and `functools.lru_cache` cannot be used. It never changes after it is made, so its identity can be the key.
The number of results is bounded. All results are dropped together, because a result of one function may be the key of
another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")
_Key = TypeVar("_Key")

_MOST_KEPT = 16_384

# One dictionary for each function, because a shorter key is found faster. A value is the objects of the key, so that no
# other object can get the same identity, and the answer.
_Kept = dict[tuple[Any, ...], tuple[object, Any]]
_kept_by_function: list[_Kept] = []


def remembered_of_two(function: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """Like `remembered`, for a function whose first two arguments are compared by identity."""
    kept, compute = _kept_of_a_function(), cast(Callable[..., _Answer], function)

    @wraps(function)
    def ask(first: Any, second: Any, *others: Any, **named: Any) -> _Answer:
        key: tuple[Any, ...] = (id(first), id(second), others)
        if named:
            key = (*key, *named.items())
        known = kept.get(key)
        if known is not None:
            answer: _Answer = known[1]
            return answer
        return _keep(kept, key, (first, second), compute(first, second, *others, **named))

    return cast(Callable[_Asked, _Answer], ask)


def remembered(function: Callable[_Asked, _Answer]) -> Callable[_Asked, _Answer]:
    """Cache the results of `function`.

    The first argument is compared by identity. Neither it nor the result may ever be changed. The other arguments must
    be hashable and take few distinct values, so no token counts. Exceptions are not cached.
    """
    kept, compute = _kept_of_a_function(), cast(Callable[..., _Answer], function)

    @wraps(function)
    def ask(first: Any, *others: Any, **named: Any) -> _Answer:
        key: tuple[Any, ...] = (id(first), others)
        if named:
            key = (*key, *named.items())
        known = kept.get(key)
        if known is not None:
            answer: _Answer = known[1]
            return answer
        return _keep(kept, key, first, compute(first, *others, **named))

    return cast(Callable[_Asked, _Answer], ask)


def forget() -> None:
    """Drop all results, and the references to the objects they belong to."""
    for kept in _kept_by_function:
        kept.clear()


def count_kept() -> int:
    """The number of results kept for all functions."""
    return sum(map(len, _kept_by_function))


def _kept_of_a_function() -> _Kept:
    kept: _Kept = {}
    _kept_by_function.append(kept)
    return kept


def keep(known: dict[_Key, _Answer], key: _Key, answer: _Answer, most: int) -> _Answer:
    """Add an answer to those that are `known`. If there are `most` of them, they are dropped first. Returns it."""
    if len(known) >= most:
        known.clear()
    known[key] = answer
    return answer


def _keep(kept: _Kept, key: tuple[Any, ...], about: object, answer: _Answer) -> _Answer:
    if count_kept() >= _MOST_KEPT:
        forget()
    kept[key] = (about, answer)
    return answer
