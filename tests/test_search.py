"""The binary searches find the number at which a condition begins or ends to hold, and no more than they must ask."""

from __future__ import annotations

import pytest

from kvcalc.search import largest_where, smallest_where


@pytest.mark.parametrize("low", range(4))
@pytest.mark.parametrize("high", range(4, 12))
def test_the_searches_agree_with_trying_every_number(low: int, high: int) -> None:
    for edge in range(14):
        from_edge = [number for number in range(low, high) if number >= edge]
        up_to_edge = [number for number in range(low + 1, high + 1) if number <= edge]
        assert smallest_where(lambda number: number >= edge, low, high) == min(from_edge, default=high)  # noqa: B023
        assert largest_where(lambda number: number <= edge, low, high) == max(up_to_edge, default=low)  # noqa: B023


def test_numbers_may_be_larger_than_a_list_is_long() -> None:
    assert largest_where(lambda number: number <= 10**30, 0, 1 << 200) == 10**30


def test_the_ends_are_not_asked() -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number >= 1000

    assert smallest_where(holds, 1, 1 << 20) == 1000
    assert len(asked) <= 20
    assert 1 << 20 not in asked
    asked.clear()
    assert largest_where(lambda number: not holds(number), 1, 1 << 20) == 999
    assert len(asked) <= 20
    assert 1 not in asked
