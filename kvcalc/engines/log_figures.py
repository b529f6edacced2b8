"""Compares a printed number, within its rounding, with the computed number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from kvcalc.engines.log_lines import Record
from kvcalc.records import NamedTuple

EQUAL, UNEXPLAINED, INPUT = "equal", "unexplained", "input"

# Engines use GB and MB for powers of 1024 too.
_POWERS = {"B": 0, "K": 1, "M": 2, "G": 3}


class Printed(NamedTuple):
    """A printed size. Every number of bytes that rounds to it is between `low` and `high`."""

    text: str
    low: Fraction
    high: Fraction

    def holds(self, size: int) -> bool:
        """Whether `size` bytes can be printed as this text."""
        return self.low <= size <= self.high

    @property
    def middle(self) -> int:
        """The printed size in bytes, rounded to a whole number."""
        return round((self.low + self.high) / 2)


def parse_printed(text: str, least_decimals: int = 0) -> Printed:
    """The size in a text such as `5.62 GiB`, plus or minus half of its last digit.

    A comma is a decimal comma, which depends on the machine's locale. `least_decimals` is the number of decimals the
    engine rounds to, for engines that print 22.50 as 22.5.
    """
    digits = text.rstrip("GMKiB ").replace(",", ".")
    unit = 1024 ** _POWERS[text[len(text.rstrip("GMKiB ")) :].strip()[0]]
    decimals = max(len(digits.partition(".")[2]), least_decimals)
    value, slack = Fraction(digits), Fraction(1, 2 * 10**decimals)
    return Printed(text, (value - slack) * unit, (value + slack) * unit)


class Figure(NamedTuple):
    """One number of a log, its verdict (`equal`, `unexplained` or `input`) and the rule behind it.

    `computed` is the result of the rule. `difference` is printed minus computed if they are not equal. Both are in
    `unit`. An input depends on the memory or on the user, so nothing is computed for it.
    """

    line: int
    name: str
    printed: str
    unit: str
    computed: int | float | None
    difference: int | float | None
    verdict: str
    rule: str


def as_input(record: Record, part: str, name: str, unit: str, rule: str) -> Figure:
    """An input: a number from one part of its line that is not checked."""
    return Figure(record.line, name, record.parts[part], unit, None, None, INPUT, rule)


def check_size(record: Record, part: str, name: str, computed: int, rule: str, least_decimals: int = 0) -> Figure:
    """Check a size that is printed rounded. It is equal if the computed size rounds to it."""
    printed = parse_printed(record.parts[part], least_decimals)
    difference = None if printed.holds(computed) else printed.middle - computed
    return _checked(record, name, printed.text, "bytes", computed, difference, rule)


def check_sizes(record: Record, sizes: Mapping[str, tuple[str, int]], number: int, words: str) -> list[Figure]:
    """Check the sizes in a line. `sizes` maps a part to its name and the bytes of one row; the cache has `number` rows.

    `{}` in `words` is replaced with the bytes of a row.
    """
    return [
        check_size(record, part, name, number * size, words.format(f"{size:,} bytes"))
        for part, (name, size) in sizes.items()
        if part in record.parts
    ]


def check_count(record: Record, part: str, name: str, computed: int, unit: str, rule: str) -> Figure:
    """Check a whole number. It is equal only if it is the same."""
    printed = record.parts[part]
    return _checked(record, name, printed, unit, computed, int(printed.replace(",", "")) - computed or None, rule)


def check_ratio(record: Record, part: str, name: str, computed: float, rule: str) -> Figure:
    """Check a ratio that is printed with a fixed number of decimals (`%.2f`) and an x."""
    digits = record.parts[part]
    decimals = len(digits.partition(".")[2])
    # Allow half of the last digit, and the rounding of a floating-point quotient.
    equal = abs(Fraction(digits) - Fraction(computed)) <= Fraction(1, 2 * 10**decimals) + Fraction(1, 10**9)
    return _checked(record, name, f"{digits}x", "x", computed, None if equal else float(digits) - computed, rule)


def _checked(
    record: Record, name: str, printed: str, unit: str, computed: float, difference: float | None, rule: str
) -> Figure:
    verdict = EQUAL if difference is None else UNEXPLAINED
    return Figure(record.line, name, printed, unit, computed, difference, verdict, rule)


def count_equal(figures: Iterable[Figure]) -> int:
    """The number of figures that are equal."""
    return sum(figure.verdict == EQUAL for figure in figures)


def count_unexplained(figures: Iterable[Figure]) -> int:
    """The number of figures that are unexplained."""
    return sum(figure.verdict == UNEXPLAINED for figure in figures)
