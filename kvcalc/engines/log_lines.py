"""The lines of an engine's start-up log: the patterns that find them, and printed numbers beside computed ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache

from kvcalc.engines.declarations import table
from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.releases import parse_release
from kvcalc.units import parse_count

EQUAL, UNEXPLAINED, INPUT = "equal", "unexplained", "input"

# Engines use GB and MB for powers of 1024 too.
_POWERS = {"B": 0, "K": 1, "M": 2, "G": 3}


class Pattern(NamedTuple):
    """A line's name, a text to search for first, and a regular expression with a group for each part.

    An expression is compiled when a line has its text, because a log has the lines of one engine.
    """

    name: str
    needle: str
    expression: str


class Lines(NamedTuple):
    """The lines of an engine's log.

    `facts` are those about the model and the settings, and `records` those with numbers. `pool_words` are words of
    lines that should have been read. `types` maps the engine's names of types that kvcalc does not have to kvcalc's.
    """

    facts: list[Pattern]
    records: list[Pattern]
    pool_words: list[str]
    types: Mapping[str, str]


@cache
def lines_of(engine: str) -> Lines:
    """The lines in `log.yaml` of the folder of `engine`, which is one of `LOGS`.

    `facts` and `records` have the patterns by name, in the order in which they are tried. A pattern has a `text` that a
    line must have and a regular expression, in which {{part}} is one of `parts`. Or it has the spellings of an `option`
    and the expression of its value. A list of texts is joined. Raises ValueError or TypeError for another field.
    """
    kinds = dict(table(engine, "log"))
    parts: dict[str, str] = {}
    for name, text in kinds.pop("parts", {}).items():
        parts[name] = _filled(text, parts)
    facts, records = (
        [line for name, rows in kinds.pop(kind).items() for row in rows for line in _patterns(name, parts, **row)]
        for kind in ("facts", "records")
    )
    return Lines(facts, records, **{"types": {}, **kinds})


def _patterns(
    name: str, parts: Mapping[str, str], text: str = "", pattern: str | list[str] = "", option: str = "",
    value: str = r"[\w.+-]+",
) -> list[Pattern]:  # fmt: skip
    """The pattern, or that of a setting for each spelling.

    A setting is as on a command line (`--max-len 8`), in a mapping (`'max_len': 8`) or a call (`max_len=8`).
    """
    if not option:
        return [Pattern(name, text, _filled(pattern, parts))]
    patterns = []
    for spelling in option.split():
        start = r"(?<!\S)" if spelling.startswith("-") else r"(?<![\w-])"
        rest = rf"{re.escape(spelling)}['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?P<value>{value})"
        patterns.append(Pattern(name, spelling, start + rest))
    return patterns


def _filled(text: str | list[str], parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], "".join(text))


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
    plain = text.rstrip("GMKiB bytes")
    digits, unit = plain.replace(",", "."), 1024 ** _POWERS[text[len(plain) :].strip()[0].upper()]
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


def count_equal(figures: Iterable[Figure]) -> int:
    """The number of figures that are equal."""
    return sum(figure.verdict == EQUAL for figure in figures)


def count_unexplained(figures: Iterable[Figure]) -> int:
    """The number of figures that are unexplained."""
    return sum(figure.verdict == UNEXPLAINED for figure in figures)


class Record(NamedTuple):
    """A line with numbers: its name, its line number in the log, and its parts as text.

    A check compares one part with the number `computed`, and returns the figure called `name`.
    """

    name: str
    line: int
    parts: dict[str, str]

    def as_input(self, part: str, name: str, unit: str, rule: str) -> Figure:
        """An input: a number that is not checked."""
        return Figure(self.line, name, self.parts[part], unit, None, None, INPUT, rule)

    def check_size(self, part: str, name: str, computed: int, rule: str, least_decimals: int = 0) -> Figure:
        """Check a size that is printed rounded. It is equal if the computed size rounds to it."""
        printed = parse_printed(self.parts[part], least_decimals)
        difference = None if printed.holds(computed) else printed.middle - computed
        return _checked(self.line, name, printed.text, "bytes", computed, difference, rule)

    def check_sizes(self, sizes: Mapping[str, tuple[str, int]], number: int, words: str) -> list[Figure]:
        """Check the sizes of a cache of `number` rows. `sizes` maps a part to its name and the bytes of one row.

        `{}` in `words` is replaced with the bytes of a row.
        """
        return [
            self.check_size(part, name, number * size, words.format(f"{size:,} bytes"))
            for part, (name, size) in sizes.items()
            if part in self.parts
        ]

    def check_count(self, part: str, name: str, computed: int, unit: str, rule: str) -> Figure:
        """Check a whole number. It is equal only if it is the same."""
        printed = self.parts[part]
        difference = int(printed.replace(",", "")) - computed or None
        return _checked(self.line, name, printed, unit, computed, difference, rule)

    def check_ratio(self, part: str, name: str, computed: float, rule: str) -> Figure:
        """Check a ratio that is printed with a fixed number of decimals (`%.2f`) and an x."""
        digits = self.parts[part]
        decimals = len(digits.partition(".")[2])
        # Allow half of the last digit, and the rounding of a floating-point quotient.
        equal = abs(Fraction(digits) - Fraction(computed)) <= Fraction(1, 2 * 10**decimals) + Fraction(1, 10**9)
        return _checked(self.line, name, f"{digits}x", "x", computed, None if equal else float(digits) - computed, rule)


def _checked(
    line: int, name: str, printed: str, unit: str, computed: float, difference: float | None, rule: str
) -> Figure:
    verdict = EQUAL if difference is None else UNEXPLAINED
    return Figure(line, name, printed, unit, computed, difference, verdict, rule)


class Fact(NamedTuple):
    """A statement of the log about the model or a setting, as text, and the first line that has it."""

    text: str
    line: int


class Unread(NamedTuple):
    """A line that seems to be about the pool, but that no pattern matches: its number, and its start."""

    line: int
    text: str


class Log(NamedTuple):
    """The log of one engine. `facts` are by name. `contradictions` has a text for each fact with two values.

    `unread` has the first lines about the pool that were not understood.
    """

    engine: str
    num_lines: int
    facts: dict[str, Fact]
    records: list[Record]
    contradictions: list[str]
    unread: list[Unread]

    def text(self, name: str) -> str | None:
        """The text of the fact `name`, or None if the log does not have it."""
        return self.facts[name].text if name in self.facts else None

    @property
    def release(self) -> str | None:
        """The engine's release. None if the log says none, or one without a known place in the engine's history."""
        version = self.text("version")
        try:
            return version if version is not None and parse_release(self.engine, version).is_placed else None
        except UsageError:
            return None

    def saying(self, name: str, text: str) -> Log:
        """This log with a user's own text for the fact `name`, which contradicts nothing."""
        return self._replace(facts={**self.facts, name: Fact(text, 0)})

    def flag(self, name: str) -> bool | None:
        """Whether the log says that the setting `name` is on. None if it does not say."""
        return {"true": True, "false": False}.get((self.text(name) or "").casefold())

    def number(self, name: str, words: str) -> int:
        """The fact `name` as a number, `words` in an error. 1 if the log does not have it. UsageError (exit 2)."""
        return parse_count(self.text(name) or "1", f"the log's {words}")

    def named(self, *names: str) -> list[Record]:
        """The records with these names, in the order of the log."""
        return [record for record in self.records if record.name in names]


class Passes:
    """Follows a log in which the engine prints the same lines several times before the model is loaded.

    Each of these passes prints the records of `names`. Without a subclass, an engine prints every line once.
    """

    names: frozenset[str] = frozenset()

    def replaces(self, name: str, said: int, line: int) -> bool:
        """Whether the fact `name` in this line replaces the one of line `said`, which is of an earlier pass."""
        return False

    def earlier(self, record: Record) -> range | None:
        """The lines that are only of earlier passes, as soon as this record tells that the model is loaded."""
        return None
