"""Every expression that reads logs takes linear time, whatever a line contains."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcalc.engines import LOGS
from kvcalc.engines.log_lines import Pattern, lines_of
from kvcalc.planning.logs.scan import _ESCAPES
from tests.rows import every_row

if sys.version_info >= (3, 11):
    from re import _parser as parser  # type: ignore[attr-defined]  # Python's own, without type information
else:
    import sre_parse as parser

LENGTH = 64 * 1024
# A search that is as slow as this in a quarter of the longer text is measured. A quadratic one takes ten times as long.
SUSPICIOUS_SECONDS = 0.015


def patterns() -> list[Pattern]:
    return [one for lines in map(lines_of, LOGS) for one in (*lines.facts, *lines.records)]


def example(tokens: Any) -> str:
    """A text that a parsed expression matches: the first alternative, and each repeat once or twice."""
    found = ""
    for operation, value in tokens:
        kind = str(operation)
        if kind == "LITERAL":
            found += chr(value)
        elif kind == "IN":
            found += member(value)
        elif kind == "ANY":
            found += "a"
        elif kind == "NOT_LITERAL":
            found += "b" if chr(value) != "b" else "c"
        elif kind == "BRANCH":
            found += example(value[1][0])
        elif kind == "SUBPATTERN":
            found += example(value[-1])
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            found += example(value[2]) * max(value[0], 1)
    return found


def member(items: Any) -> str:
    """A character of a class."""
    for operation, value in items:
        kind = str(operation)
        if kind == "NEGATE":
            return "x"
        if kind == "LITERAL":
            return chr(value)
        if kind == "RANGE":
            return chr(value[0])
        if kind == "CATEGORY":
            return {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " "}.get(str(value), "a")
    return "a"


def adversarial(expression: str, length: int) -> Iterator[str]:
    """Texts that nearly match: parts of a match that go on for long, and long repetitions of a match that fails."""
    whole = example(parser.parse(expression))
    for character in ("a", "1", " ", "-", ".", ",", "=", "'", "("):
        yield character * length
        yield (character * length)[: -len(whole)] + whole[1:]
        yield whole[:-1] + character * length
    for end in range(1, len(whole)):
        part = whole[:end]
        yield part + part[-1] * length
        if end == len(whole) - 1 or end % 4 == 0:
            yield part * (length // end)
            yield (part + " ") * (length // (end + 1))


def seconds(expression: re.Pattern[Any], text: Any) -> float:
    """The processor time of a search, which other processes do not lengthen."""
    start = time.process_time()
    for _ in expression.finditer(text):
        pass
    return time.process_time() - start


def _is_slow(expression: re.Pattern[Any], short: Any, long: Any) -> bool:
    """Whether the longer text takes more than three times as long. Other processes disturb single measurements."""
    halves, wholes = zip(*((seconds(expression, short), seconds(expression, long)) for _ in range(3)))
    return bool(statistics.median(wholes) > 3 * statistics.median(halves))


def suspicious(expression: re.Pattern[str]) -> str | None:
    """A text for which twice the length takes more than three times as long, or None."""
    for sample, short, long in zip(*(adversarial(expression.pattern, LENGTH * n // 2) for n in (1, 2, 4))):
        if seconds(expression, sample) < SUSPICIOUS_SECONDS:
            continue
        if all(_is_slow(expression, short, long) for _ in range(3)):
            return f"{expression.pattern}: {long[:40]!r}...{long[-40:]!r}"
    return None


@pytest.mark.parametrize("engine", LOGS)
def test_twice_the_length_takes_at_most_three_times_as_long(engine: str) -> None:
    lines = lines_of(engine)
    assert not list(filter(None, (suspicious(re.compile(one.expression)) for one in (*lines.facts, *lines.records))))


def test_so_it_does_to_remove_escape_sequences() -> None:
    for part in (b"\x1b[", b"\x1b]", b"\x1b[0;", b"\x1b]0;t\x1b", b"\x1b", b"\x1b[0 "):
        short, long = (part * (length // len(part)) for length in (LENGTH, 2 * LENGTH))
        is_quick = seconds(_ESCAPES, long) < 4 * SUSPICIOUS_SECONDS
        assert is_quick or not all(_is_slow(_ESCAPES, short, long) for _ in range(3))


@pytest.mark.parametrize(
    ("expression", "is_slow"),
    [(r"(?P<device>[\w-]+) KV buffer size", True), (r"(?<![\w-])(?P<device>[\w-]{1,64}) KV buffer size", False)],
)
def test_the_check_finds_a_quadratic_expression(
    expression: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, smaller in (("LENGTH", 2048), ("SUSPICIOUS_SECONDS", 0.003)):
        monkeypatch.setattr(sys.modules[__name__], name, smaller)
    assert (suspicious(re.compile(expression)) is not None) is is_slow


@every_row("one", patterns())
def test_every_pattern_matches_an_example_with_its_needle(one: Pattern) -> None:
    """Otherwise the adversarial texts are not near to a match, and a needle could hide a pattern."""
    text = example(parser.parse(one.expression))
    assert re.search(one.expression, text) or re.search(one.expression, f" {text}"), text
    if one.needle not in ("█", "stored in KV cache ("):  # elsewhere on the line
        assert one.needle.casefold() in text.casefold()
