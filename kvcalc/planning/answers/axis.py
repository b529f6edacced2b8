"""The values of a list option: `1k..1M` doubles, `4k..64k:4k` adds, commas make lists, and `all` names every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Union

from kvcalc.engines import ENGINES
from kvcalc.errors import UsageError

ALL = "all"

ParseOne = Callable[[str, str], int]
"""Reads one number of an option: its text and the option's name (`parse_tokens`, `parse_count`)."""

_MOST_PARTS = 1000


class Axis(Sequence[int]):
    """Whole numbers in the order they were written. A range with a step is never expanded."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, place: Union[int, slice]) -> int:  # type: ignore[override]  # numbers one by one
        if isinstance(place, slice):
            raise TypeError("an axis cannot be sliced")
        for part in self._parts:
            if place < len(part):
                return part[place]
            place -= len(part)
        raise IndexError("axis index out of range")

    def __iter__(self) -> Iterator[int]:
        for part in self._parts:
            yield from part

    @property
    def largest(self) -> int:
        """The largest value."""
        return max(max(part[0], part[-1]) for part in self._parts)

    @property
    def smallest(self) -> int:
        """The smallest value."""
        return min(min(part[0], part[-1]) for part in self._parts)

    def sample(self, most: int) -> list[int]:
        """At most `most` of the values, sorted, without duplicates, including the first and the last."""
        count = len(self)
        if count <= most:
            return sorted(set(self))
        return sorted({self[place * (count - 1) // (most - 1)] for place in range(most)})


def parse_axis(text: str, option: str, parse_one: ParseOne) -> Axis:
    """The numbers in `8192`, `1,8,64`, `1k..1M` (1k, 2k, 4k, ... up to 1M) or `4k..64k:4k`, and lists of these.

    UsageError (exit 2) if a part is none of these, or if a range is empty.
    """
    words = text.split(",")
    if len(words) > _MOST_PARTS:
        raise UsageError(f"{option}: a list of {len(words):,} values; the maximum is {_MOST_PARTS:,}")
    return Axis([_part(word.strip(), option, parse_one) for word in words])


def _part(word: str, option: str, parse_one: ParseOne) -> Sequence[int]:
    first, dots, rest = word.partition("..")
    if not dots:
        return (parse_one(word, option),)
    last, colon, step = rest.partition(":")
    low, high = parse_one(first, option), parse_one(last, option)
    if low > high:
        raise UsageError(f"{option} {word[:40]}: {low} is greater than {high}", "write the smaller end first")
    if colon:
        by = parse_one(step, option)
        if (high - low) // by >= 1 << 60:
            raise UsageError(f"{option} {word[:40]}: more values than can be counted")
        return range(low, high + 1, by)
    doubled = [low]
    while doubled[-1] * 2 <= high:
        doubled.append(doubled[-1] * 2)
    return doubled


def parse_engines(names: Sequence[str]) -> tuple[str, ...]:
    """The engines with these names, in lower case, without duplicates. `all` means every engine."""
    engines: list[str] = []
    for name in names:
        engines += ENGINES if name.casefold() == ALL else [name.casefold()]
    return tuple(dict.fromkeys(engines))
