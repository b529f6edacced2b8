"""Reads the start-up logs of engines: one module of patterns per engine, and the facts found in a log.

Nothing is computed here. An engine's module has `FACTS`, the lines about the model and the settings, `RECORDS`, the
lines with numbers, and `POOL_WORDS`, words of lines that should have been read. To support a new line, add a `Pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from operator import itemgetter

from kvcalc.errors import UsageError, nearest
from kvcalc.planning.logs.passes import Passes, is_of_pass
from kvcalc.planning.logs.scan import Line, Scanner
from kvcalc.records import NamedTuple

# Engine name -> module in this package.
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm", "llama.cpp": "llama_cpp"}

_SPELLINGS = {
    "none": "", "auto": "", "enable": "true", "enabled": "true", "on": "true", "no": "false", "disabled": "false",
    "off": "false",
}  # fmt: skip

# A line about the pool has a size or a number of something. Other lines with the same words are about choices.
_SIZE = re.compile(r"\d ?(?:[KMGT]i?B|bytes|tokens|blocks|cells)\b|(?:tokens|blocks|bytes|size|#\w+)\W{1,4}\d")
# No engine prints a number this long, and parsing longer ones is slow.
_LONGEST_NUMBER = 32
# Of the lines about the pool that no pattern matches, the first ones are kept, and the start of each.
_MOST_UNREAD, _LONGEST_UNREAD = 3, 160
# One start prints about thirty distinct numbers on a large machine. More mean several starts in one file.
_MOST_RECORDS = 200


class Pattern(NamedTuple):
    """A line's name, a text to search for first, and the regular expression with a group for each part."""

    name: str
    needle: str
    expression: re.Pattern[str]


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

    def named(self, *names: str) -> list[Record]:
        """The records with these names, in the order of the log."""
        return [record for record in self.records if record.name in names]


def pattern(name: str, needle: str, expression: str) -> Pattern:
    """A Pattern with its expression compiled."""
    return Pattern(name, needle, re.compile(expression))


def option(name: str, *spellings: str, value: str = r"[\w.+-]+") -> list[Pattern]:
    """A setting as on a command line (`--max-len 8`), in a mapping (`'max_len': 8`) or a call (`max_len=8`)."""
    patterns = []
    for spelling in spellings:
        start = r"(?<!\S)" if spelling.startswith("-") else r"(?<![\w-])"
        parts = rf"{start}{re.escape(spelling)}['\"]?(?:\s*[=:]\s*|\s+)['\"]?(?P<value>{value})"
        patterns.append(pattern(name, spelling, parts))
    return patterns


def read_log(log: str | Iterable[bytes], name: str, engine: str | None = None) -> Log:
    """Read the log of `engine`. Without `engine`, take the engine that matches the most lines.

    `log` is the text, or its bytes in pieces, which are read once. Bytes that are not UTF-8 are replaced; UTF-16 is
    read. Raises UsageError (exit 2) if the engine is unknown, or if no line has a number that kvcalc knows.
    """
    if engine is not None and engine not in ENGINES:
        hint = nearest(engine, ENGINES) or f"one of {', '.join(ENGINES)}"
        raise UsageError(f"--engine {engine[:40]!a}: logs of this engine are not supported", hint)
    found = _read(log, [engine] if engine else [*ENGINES])
    best = max(found, key=lambda log: (len({record.name for record in log.records}), len(log.facts)))
    if len(best.records) > _MOST_RECORDS:
        words = f"too many lines with numbers about the cache: a start prints at most {_MOST_RECORDS}"
        raise UsageError(f"{name}: {words}", "give the log of one start")
    if not best.records:
        what = f"of {engine}" if engine else "of vLLM, SGLang, TensorRT-LLM or llama.cpp"
        raise UsageError(
            f"{name}: no line {what} with a number about its cache", "give the engine's log from its start"
        )
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
        module = import_module(f"kvcalc.planning.logs.{ENGINES[engine]}")
        self._engine = engine
        self._facts_by_needle = _by_needle(module.FACTS)
        self._records_by_needle = _by_needle(module.RECORDS)
        self._pool_words: tuple[str, ...] = module.POOL_WORDS
        self.needles = frozenset((*self._facts_by_needle, *self._records_by_needle, *self._pool_words))
        self._unread: list[Unread] = []
        self._facts: dict[str, Fact] = {}
        self._contradictions: dict[str, str] = {}
        # Each record once: all ranks print the same line, and a service may print it to two streams.
        self._records: dict[tuple[str, tuple[tuple[str, str], ...]], Record] = {}
        self._passes = Passes()

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
            parts = {part: found for part, found in match.groupdict().items() if found is not None}
            if len(self._records) <= _MOST_RECORDS and all(len(found) <= _LONGEST_NUMBER for found in parts.values()):
                record = Record(name, line.number, parts)
                measured = self._passes.measured(name, parts.get("size", ""), line.number)
                if measured:
                    self._drop(measured)
                self._records.setdefault((name, tuple(parts.items())), record)
        if not is_read and len(self._unread) < _MOST_UNREAD and not line.needles.isdisjoint(self._pool_words):
            text = "".join(filter(str.isprintable, line.text)).strip()
            if _SIZE.search(text):
                self._unread.append(Unread(line.number, text[:_LONGEST_UNREAD]))

    def _drop(self, lines: range) -> None:
        """Drop the records of these lines that the model which is loaded prints again."""
        self._records = {
            key: one for key, one in self._records.items() if not (is_of_pass(one.name) and one.line in lines)
        }

    def found(self, num_lines: int) -> Log:
        records = list(self._records.values())
        return Log(
            self._engine, num_lines, self._facts, records, list(self._contradictions.values()), self._unread
        )  # fmt: skip


_Ordered = dict[str, list[tuple[int, Pattern]]]


def _by_needle(patterns: Iterable[Pattern]) -> _Ordered:
    """The patterns by needle, with their places in the order in which they are tried."""
    found: _Ordered = {}
    for place, one in enumerate(patterns):
        found.setdefault(one.needle, []).append((place, one))
    return found


def _matches(line: Line, patterns: _Ordered) -> Iterator[tuple[str, re.Match[str]]]:
    """The name and the match of every pattern that the line matches, in the order of the patterns."""
    found = [item for needle in line.needles if needle in patterns for item in patterns[needle]]
    for _, (name, _, expression) in sorted(found, key=itemgetter(0)) if len(found) > 1 else found:
        match = expression.search(line.text)
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
