"""The lines of an engine's start-up log: the patterns that find them, and what they say. Nothing is computed here."""

from __future__ import annotations

import re

from kvcalc.records import NamedTuple
from kvcalc.units import parse_count


class Pattern(NamedTuple):
    """A line's name, a text to search for first, and a regular expression with a group for each part.

    An expression is compiled when a line has its text, because a log has the lines of one engine.
    """

    name: str
    needle: str
    expression: str


def option(name: str, *spellings: str, value: str = r"[\w.+-]+") -> list[Pattern]:
    """A setting as on a command line (`--max-len 8`), in a mapping (`'max_len': 8`) or a call (`max_len=8`)."""
    patterns = []
    for spelling in spellings:
        start = r"(?<!\S)" if spelling.startswith("-") else r"(?<![\w-])"
        parts = rf"{start}{re.escape(spelling)}['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?P<value>{value})"
        patterns.append(Pattern(name, spelling, parts))
    return patterns


class Record(NamedTuple):
    """A line with numbers: its name, its line number in the log, and its parts as text."""

    name: str
    line: int
    parts: dict[str, str]


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

    def is_on(self, name: str) -> bool:
        """Whether the log says that the setting `name` is on."""
        return (self.text(name) or "").casefold() == "true"

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

    def earlier(self, record: Record) -> range:
        """The lines that are only of earlier passes, as soon as this record tells that the model is loaded."""
        return range(0)
