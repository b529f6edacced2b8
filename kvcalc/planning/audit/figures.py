"""A printed number and what it may stand for, beside the number computed."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.planning.logs import Record

EQUAL, UNEXPLAINED, INPUT = "equal", "unexplained", "input"

# Engines' GB and MB are powers of 1024 too.
_POWERS = {"B": 0, "K": 1, "M": 2, "G": 3}


class Printed(NamedTuple):
    """A size as printed, in bytes: all that rounds to it lies between `low` and `high`."""

    text: str
    low: Fraction
    high: Fraction

    def holds(self, size: int) -> bool:
        """Whether so many bytes may have been printed as this."""
        return self.low <= size <= self.high

    @property
    def middle(self) -> int:
        """The bytes it says, to the next whole one."""
        return round((self.low + self.high) / 2)


def parse_printed(text: str, least_decimals: int = 0) -> Printed:
    """The size in `5.62 GiB`, give or take half of its last digit.

    A comma is a decimal one, of the machine's language. `least_decimals`: an engine that rounds to so many prints 22.50
    as 22.5.
    """
    digits = text.rstrip("GMKiB ").replace(",", ".")
    unit = 1024 ** _POWERS[text[len(text.rstrip("GMKiB ")) :].strip()[0]]
    decimals = max(len(digits.partition(".")[2]), least_decimals)
    value, slack = Fraction(digits), Fraction(1, 2 * 10**decimals)
    return Printed(text, (value - slack) * unit, (value + slack) * unit)


class Figure(NamedTuple):
    """One number of a log with its verdict, `equal`, `unexplained` or `input`, and the rule that gives it.

    `computed` is what the rule gives, `difference` the printed number less that where they are not equal; both are in
    `unit`. An input is what the memory or a person decides: nothing is computed for it.
    """

    line: int
    name: str
    printed: str
    unit: str
    computed: int | float | None
    difference: int | float | None
    verdict: str
    rule: str

    def describe(self) -> dict[str, Any]:
        """The figure as it stands in a document."""
        return self._asdict()


def given(record: Record, name: str, printed: str, unit: str, rule: str) -> Figure:
    """A number taken as it stands."""
    return Figure(record.line, name, printed, unit, None, None, INPUT, rule)


def check_size(record: Record, name: str, printed: Printed, computed: int, rule: str) -> Figure:
    """A size printed with few digits: equal where the computed one rounds to it."""
    equal = printed.holds(computed)
    difference = None if equal else printed.middle - computed
    return Figure(record.line, name, printed.text, "bytes", computed, difference, EQUAL if equal else UNEXPLAINED, rule)


def check_count(record: Record, name: str, printed: str, computed: int, unit: str, rule: str) -> Figure:
    """A whole number: equal where it is the same."""
    value = int(printed.replace(",", ""))
    difference = None if value == computed else value - computed
    return Figure(
        record.line, name, printed, unit, computed, difference, UNEXPLAINED if difference else EQUAL, rule
    )  # fmt: skip


def check_ratio(record: Record, name: str, printed: str, computed: float, rule: str) -> Figure:
    """A ratio printed with so many decimals, as `%.2f` gives them."""
    digits = printed.rstrip("x")
    decimals = len(digits.partition(".")[2])
    # Half of the last digit, and the last bit of a quotient in floating point.
    equal = abs(Fraction(digits) - Fraction(computed)) <= Fraction(1, 2 * 10**decimals) + Fraction(1, 10**9)
    difference = None if equal else float(digits) - computed
    return Figure(record.line, name, printed, "x", computed, difference, EQUAL if equal else UNEXPLAINED, rule)


def count_equal(figures: Iterable[Figure]) -> int:
    """How many are equal."""
    return sum(figure.verdict == EQUAL for figure in figures)


def count_unexplained(figures: Iterable[Figure]) -> int:
    """How many are not explained."""
    return sum(figure.verdict == UNEXPLAINED for figure in figures)
