"""The lines of a log that have a marker are found wherever they are, with their numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kvcalc.engines import LOGS
from kvcalc.planning.logs import markers
from kvcalc.planning.logs.scan import _PART, LONGEST_LINE, Markers, Scanner

MARKERS = markers(LOGS)


def expected(data: bytes) -> list[tuple[int, frozenset[str]]]:
    """The numbers and markers of the lines of a log, from a search of each line for each marker."""
    lines = [line[:LONGEST_LINE].decode(errors="replace") for line in data.split(b"\n")]
    found = [(number, frozenset(filter(line.__contains__, MARKERS))) for number, line in enumerate(lines, 1)]
    return [(number, needles) for number, needles in found if needles]


def scanned(chunks: Iterable[bytes]) -> list[tuple[int, frozenset[str]]]:
    return [(line.number, line.needles) for line in Scanner(chunks, MARKERS)]


@pytest.mark.parametrize("filler", [b"q" * 49 + b"\n", b"q" * 60_000 + b"\n", b"\n"], ids=["lines", "long", "empty"])
@pytest.mark.parametrize("marker", ["-tp", "█", "GPU blocks:", "--disable-hybrid-kv-cache-manager"])
def test_a_marker_at_every_place_around_a_border_is_found(marker: str, filler: bytes) -> None:
    text = marker.encode()
    before = filler * (_PART // len(filler) + 1)
    for place in range(_PART - len(text) - 4, _PART + 5):
        data = before[:place] + text + b" 1\n" + filler * 3
        number = data.count(b"\n", 0, place) + 1
        found = [(number, needles) for _, needles in expected(data[data.rfind(b"\n", 0, place) + 1 :][:LONGEST_LINE])]
        assert found
        assert scanned([data]) == found, place
        assert scanned([data[:_PART], data[_PART:]]) == found, place


@pytest.mark.parametrize("seed", range(8))
def test_the_same_lines_are_found_as_by_a_search_of_each_line(seed: int) -> None:
    """Of texts made of markers, parts of markers, and letters."""
    draw = random.Random(seed)
    parts = [marker[draw.randrange(3) : len(marker) - draw.randrange(3)] for marker in draw.choices(MARKERS, k=300)]
    parts += ["\n"] * 60 + [" ", "-", "_", "--", "q", "1"] * 20
    data = "".join(draw.choices(parts, k=20_000)).encode()
    assert scanned([data]) == expected(data)
    size = draw.randint(1000, 100_000)
    assert scanned(data[at : at + size] for at in range(0, len(data), size)) == expected(data)


def test_every_marker_is_found_alone() -> None:
    found = Markers(map(str.encode, MARKERS))
    for marker in MARKERS:
        assert list(found.lines(marker.encode())) == [(0, len(marker.encode()))]


def test_a_marker_with_a_digit_is_found_among_lines_like_others() -> None:
    same = b"INFO 12:00:00 10 requests are running, 3 are waiting\n" * 1000
    line = b"DSV4 pool sizes: full=1, swa=2, c4=3, c128=4, c4_state=5\n"
    assert "DSV4 pool sizes: " in MARKERS
    assert [number for number, _ in scanned([same, same + line + same])] == [2001]


def test_a_marker_that_is_too_frequent_is_no_longer_looked_for() -> None:
    data = b"-tp 1\n" * 2_000 + b"-tp 2\n" * 10 + b"-pp 2 -tp 2\n"
    assert scanned([data])[1_998:] == [
        (1_999, frozenset({"-tp"})), (2_000, frozenset({"-tp"})), (2_011, frozenset({"-pp"}))
    ]  # fmt: skip
