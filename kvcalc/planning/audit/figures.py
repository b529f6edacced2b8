"""A printed number and what it may stand for, beside the number computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

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


def given(record: Record, part: str, name: str, unit: str, rule: str) -> Figure:
    """A number taken as it stands, of one part of its line."""
    return Figure(record.line, name, record.parts[part], unit, None, None, INPUT, rule)


def check_size(record: Record, part: str, name: str, computed: int, rule: str, least_decimals: int = 0) -> Figure:
    """A size printed with few digits: equal where the computed one rounds to it."""
    printed = parse_printed(record.parts[part], least_decimals)
    difference = None if printed.holds(computed) else printed.middle - computed
    return _checked(record, name, printed.text, "bytes", computed, difference, rule)


def check_sizes(record: Record, sizes: Mapping[str, tuple[str, int]], number: int, words: str) -> list[Figure]:
    """The sizes a line prints. `sizes` maps a part to its name and the bytes of one row; the cache has `number` rows.

    `{}` in `words` stands for the bytes of a row.
    """
    return [
        check_size(record, part, name, number * size, words.format(f"{size:,} bytes"))
        for part, (name, size) in sizes.items()
        if part in record.parts
    ]


def check_count(record: Record, part: str, name: str, computed: int, unit: str, rule: str) -> Figure:
    """A whole number: equal where it is the same."""
    printed = record.parts[part]
    return _checked(record, name, printed, unit, computed, int(printed.replace(",", "")) - computed or None, rule)


def check_ratio(record: Record, part: str, name: str, computed: float, rule: str) -> Figure:
    """A ratio printed with so many decimals, as `%.2f` gives them, and an x."""
    digits = record.parts[part]
    decimals = len(digits.partition(".")[2])
    # Half of the last digit, and the last bit of a quotient in floating point.
    equal = abs(Fraction(digits) - Fraction(computed)) <= Fraction(1, 2 * 10**decimals) + Fraction(1, 10**9)
    return _checked(record, name, f"{digits}x", "x", computed, None if equal else float(digits) - computed, rule)


def _checked(
    record: Record, name: str, printed: str, unit: str, computed: float, difference: float | None, rule: str
) -> Figure:
    verdict = EQUAL if difference is None else UNEXPLAINED
    return Figure(record.line, name, printed, unit, computed, difference, verdict, rule)


def count_equal(figures: Iterable[Figure]) -> int:
    """How many are equal."""
    return sum(figure.verdict == EQUAL for figure in figures)


def count_unexplained(figures: Iterable[Figure]) -> int:
    """How many are not explained."""
    return sum(figure.verdict == UNEXPLAINED for figure in figures)
