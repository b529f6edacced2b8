"""Reads the start-up log of an engine: the facts and the numbers that it prints. Nothing is computed here.

What the lines look like is the engine's own (`kvcalc.engines.log`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import itemgetter

from kvcalc.engines import LOGS, engine_class, log_reader
from kvcalc.engines.log_lines import Fact, Log, Pattern, Record, Unread, lines_of
from kvcalc.errors import UsageError, nearest
from kvcalc.planning.logs.scan import Line, Scanner

_SPELLINGS = {
    "none": "", "auto": "", "enable": "true", "enabled": "true", "on": "true", "no": "false", "disabled": "false",
    "off": "false",
}  # fmt: skip

# A line about the pool has a size or a number of something. Other lines with the same words are about choices.
_SIZE = re.compile(r"\d ?(?:[KMGT]i?B|bytes|tokens|blocks|cells)\b|(?:tokens|blocks|bytes|size|#\w+)\W{1,4}\d")
# No engine prints a number this long, and parsing longer ones is slow.
_LONGEST_NUMBER = 32
# At most this many lines about the pool that no pattern matches are kept, and this many characters of each.
_MOST_UNREAD, _LONGEST_UNREAD = 3, 160
# One start prints about thirty distinct numbers on a large machine. More mean several starts in one file.
_MOST_RECORDS = 200


def read_log(log: str | Iterable[bytes], name: str, engine: str | None = None) -> Log:
    """Read the log of `engine`. Without `engine`, take the engine that matches the most lines.

    `log` is the text, or its bytes in pieces, which are read once. Bytes that are not UTF-8 are replaced; UTF-16 is
    read. Raises UsageError (exit 2) if the engine is unknown, or if no line has a number that kvcalc knows.
    """
    if engine is not None and engine not in LOGS:
        hint = nearest(engine, LOGS) or f"one of {', '.join(LOGS)}"
        raise UsageError(f"--engine {engine[:40]!a}: logs of this engine are not supported", hint)
    log_read = _read(log, [engine] if engine else LOGS)
    best = max(log_read, key=lambda log: (len({record.name for record in log.records}), len(log.facts)))
    if len(best.records) > _MOST_RECORDS:
        words = f"too many lines with numbers about the cache: a start prints at most {_MOST_RECORDS}"
        raise UsageError(f"{name}: {words}", "give the log of one start")
    if not best.records:
        *titles, last = (engine_class(engine_of_log).title for engine_of_log in LOGS)
        whose = engine or f"{', '.join(titles)} or {last}"
        words = f"{name}: no line of {whose} with a number about its cache"
        raise UsageError(words, "give the engine's log from its start")
    return best


def markers(engines: Iterable[str]) -> list[str]:
    """The texts that a line of a log of these engines must have to be read: at least one of them."""
    return sorted(set().union(*(_Reader(engine).needles for engine in engines)))


def _read(log: str | Iterable[bytes], engines: Sequence[str]) -> list[Log]:
    """What the log says if it is of each of these engines."""
    chunks = (log.encode(errors="replace"),) if isinstance(log, str) else log
    readers = [_Reader(engine) for engine in engines]
    lines = Scanner(chunks, (needle for reader in readers for needle in reader.needles))
    for line in lines:
        for reader in readers:
            if not line.needles.isdisjoint(reader.needles):
                reader.read(line)
    return [reader.found(lines.num_lines) for reader in readers]


class _Reader:
    """Collects the facts and the records of one engine's log, line by line."""

    def __init__(self, engine: str) -> None:
        engine_lines = lines_of(engine)
        self._engine = engine
        self._facts_by_needle, self._records_by_needle = (
            _by_needle(engine_lines.facts),
            _by_needle(engine_lines.records),
        )
        self._pool_words = engine_lines.pool_words
        self.needles = frozenset((*self._facts_by_needle, *self._records_by_needle, *self._pool_words))
        self._unread: list[Unread] = []
        self._facts: dict[str, Fact] = {}
        self._contradictions: dict[str, str] = {}
        # Each record once: all ranks print the same line, and a service may print it to two streams.
        self._records: dict[tuple[str, tuple[tuple[str, str], ...]], Record] = {}
        self._passes = log_reader(engine).passes()

    def read(self, line: Line) -> None:
        for name, match in _matches(line, self._facts_by_needle):
            value = _normal(match["value"])
            if not value:
                continue
            said = self._facts.setdefault(name, Fact(value, line.number))
            if self._passes.replaces(name, said.line, line.number):
                said = self._facts[name] = Fact(value, line.number)
            if said.text.casefold() != value.casefold():
                words = f"line {line.number} says {name} is {value!a}, but line {said.line} says {said.text!a}, "
                self._contradictions.setdefault(name, f"{words}which is used")
        is_read = False
        for name, match in _matches(line, self._records_by_needle):
            is_read = True
            parts = {part: number for part, number in match.groupdict().items() if number is not None}
            if len(self._records) <= _MOST_RECORDS and all(len(number) <= _LONGEST_NUMBER for number in parts.values()):
                record = Record(name, line.number, parts)
                earlier = self._passes.earlier(record)
                if earlier:  # the engine prints these records again
                    again, kept = self._passes.names, self._records.items()
                    self._records = {
                        k: record for k, record in kept if not (record.name in again and record.line in earlier)
                    }
                self._records.setdefault((name, tuple(parts.items())), record)
        if not is_read and len(self._unread) < _MOST_UNREAD and not line.needles.isdisjoint(self._pool_words):
            text = "".join(filter(str.isprintable, line.text)).strip()
            if _SIZE.search(text):
                self._unread.append(Unread(line.number, text[:_LONGEST_UNREAD]))

    def found(self, num_lines: int) -> Log:
        records = list(self._records.values())
        return Log(
            self._engine, num_lines, self._facts, records, list(self._contradictions.values()), self._unread
        )  # fmt: skip


_compiled = cache(re.compile)
_Ordered = dict[str, list[tuple[int, Pattern]]]


def _by_needle(patterns: Iterable[Pattern]) -> _Ordered:
    """The patterns by needle, with their places in the order in which they are tried."""
    by_needle: _Ordered = {}
    for place, pattern in enumerate(patterns):
        by_needle.setdefault(pattern.needle, []).append((place, pattern))
    return by_needle


def _matches(line: Line, patterns: _Ordered) -> Iterator[tuple[str, re.Match[str]]]:
    """The name and the match of every pattern that the line matches, in the order of the patterns."""
    items = [item for needle in line.needles if needle in patterns for item in patterns[needle]]
    for _, (name, _, expression) in sorted(items, key=itemgetter(0)) if len(items) > 1 else items:
        match = _compiled(expression).search(line.text)
        if match is not None:
            yield name, match


def _normal(value: str) -> str:
    """One spelling for yes and no, and digits without commas. Empty if the value leaves the choice to the engine.

    Unprintable characters are removed, so that they do not reach a terminal.
    """
    value = "".join(filter(str.isprintable, value)).strip()
    digits = value.replace(",", "")
    # A list of numbers, such as 16,32, keeps its commas.
    if digits.isdigit() and all(len(part) == 3 for part in value.split(",")[1:]):
        return digits if len(digits) <= _LONGEST_NUMBER else ""
    return _SPELLINGS.get(value.casefold(), value)
