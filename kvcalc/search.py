"""Binary search for the number at which a condition begins or ends to hold."""

from __future__ import annotations

from collections.abc import Callable

Holds = Callable[[int], bool]


def smallest_where(holds: Holds, low: int, high: int) -> int:
    """The least number from `low` for which a condition holds that also holds for all larger ones, or `high`."""
    while low < high:  # `bisect` takes no numbers beyond 2**63
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def largest_where(holds: Holds, low: int, high: int) -> int:
    """The largest number up to `high` for which a condition holds that also holds for all smaller ones, or `low`."""
    return smallest_where(lambda number: not holds(number), low + 1, high + 1) - 1
