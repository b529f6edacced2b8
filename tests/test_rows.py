"""The tests of whole tables report every wrong row."""

from __future__ import annotations

import inspect

import pytest

from tests.rows import MOST_SHOWN, every_row


@every_row("one, other", [(1, 2), (3, 4)])
@every_row("sign", [1, -1])
def checked(one: int, other: int, sign: int, seen: list[tuple[int, int]], wrong: int) -> None:
    if sign == 0:
        pytest.skip("nothing to check")
    seen.append((one * sign, other))
    assert one != wrong, "the row is wrong"


def test_every_row_is_checked_and_fixtures_are_asked_for() -> None:
    assert [*inspect.signature(checked).parameters] == ["seen", "wrong"]
    seen: list[tuple[int, int]] = []
    checked(seen=seen, wrong=0)
    assert seen == [(1, 2), (-1, 2), (3, 4), (-3, 4)]


def test_wrong_rows_are_named_and_the_others_are_checked_too() -> None:
    seen: list[tuple[int, int]] = []
    with pytest.raises(
        AssertionError, match=r"(?s)1 of 2 rows are wrong.*'one': 1.*2 of 2.*the row is wrong"
    ) as caught:
        checked(seen=seen, wrong=1)
    assert len(seen) == 4
    assert isinstance(caught.value.__cause__, AssertionError)


@pytest.mark.parametrize("what", [KeyError("x"), pytest.fail.Exception("x"), ValueError()])
def test_any_failure_of_a_row_counts(what: BaseException) -> None:
    @every_row("number", range(100))
    def fails(number: int) -> None:
        if number:
            raise what

    with pytest.raises(AssertionError, match=f"{MOST_SHOWN} of 100 rows"):
        fails()


def test_a_table_of_which_every_row_is_skipped_is_skipped() -> None:
    @every_row("number", range(3))
    def skips(number: int) -> None:
        if number < most:
            pytest.skip("not here")

    most = 2
    skips()
    most = 3
    with pytest.raises(pytest.skip.Exception, match="not here"):
        skips()


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="number"):
        every_row("number", [])
