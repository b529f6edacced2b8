"""Find the few lines of a log that may matter, in one pass and little memory.

A log may have gigabytes of requests after a start of a few hundred lines. The log is read in blocks, which are
searched for the needles of all patterns at once. Only lines with a needle are decoded.

Python searches for one text quickly, and for many texts slowly. So the markers are superimposed. Four bytes of each
marker, its window, belong to one of four groups. For each byte, a table says at which places of a group's windows it
occurs, one bit per place. A block is translated with the table and read as one large integer. Shifts and ands of this
integer find the places where every byte fits (Shift-And with classes of characters; Navarro and Raffinot, Flexible
Pattern Matching in Strings, chapter 4). The few places found are looked up in a dictionary.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from math import prod

from kvcalc.records import NamedTuple

# Only the start of a longer line is read. The longest known line is a dump of settings, about 10 kB.
LONGEST_LINE = 64 * 1024

# The encoding is guessed from this many bytes.
_START_BYTES = 4096

# A start prints a needle at most a few hundred times. If more lines have one, they are requests, and the needle is no
# longer looked for. This also bounds the time for a log in which every line has some needle: 5 s for all of them.
_MOST_LINES = 2_000

# Colours, cursor movements and window titles (ECMA-48), which terminals and containers leave in a log.
_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_NO_BREAK_SPACE = "\xa0".encode()

_ONE_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)
# Bounds on the memory for known lines, and when comparing lines is not worth its time: most lines are new, or short.
_MOST_KNOWN, _LONGEST_KNOWN = 20_000, 1024
_MOST_FRUITLESS, _SHORTEST_MEAN = 8, 24


class Line(NamedTuple):
    """A line with a needle: its number, from 1, its text, and the needles."""

    number: int
    text: str
    needles: frozenset[str]


class Scanner:
    """Iterates over the lines of a log that have one of `needles`. Afterwards, `num_lines` is the number of lines."""

    def __init__(self, chunks: Iterable[bytes], needles: Iterable[str]) -> None:
        self._chunks = chunks
        self._left = {needle: needle.encode() for needle in needles}
        self._counts: Counter[str] = Counter()
        self._markers = _markers_of(frozenset(self._left.values()))
        self._repeats = _Repeats(self._left.values())
        self.num_lines = 1

    def __iter__(self) -> Iterator[Line]:
        newlines = trailing = 0
        for block in _blocks(_plain(self._chunks)):
            yield from self._lines_in(block, newlines + 1)
            newlines += block.count(b"\n")
            rest = len(block) - len(block.rstrip(b"\n"))
            trailing = rest if rest < len(block) else trailing + rest
            # The empty lines at the end do not count.
            self.num_lines = newlines - trailing + 1

    def _lines_in(self, block: bytes, first: int) -> Iterator[Line]:
        """The lines with a needle in a block of whole lines, of which the first has the number `first`."""
        if self._repeats.has_only_known(block, self._markers):
            return
        number, counted, at = first, 0, 0
        while self._left and at < len(block):
            markers = self._markers
            for start, end in markers.lines(block, at):
                line = block[start : min(end, start + LONGEST_LINE)]
                needles = frozenset(map(bytes.decode, markers.found_in(line)))
                if not needles:  # beyond the start of a long line
                    continue
                number += block.count(b"\n", counted, start)
                counted = start
                yield Line(number, line.decode(errors="replace"), needles)
                self._count(needles)
                if self._markers is not markers:
                    at = end
                    break
            else:
                return

    def _count(self, needles: frozenset[str]) -> None:
        self._counts.update(needles)
        exhausted = [needle for needle in needles if self._counts[needle] >= _MOST_LINES]
        for needle in exhausted:
            del self._left[needle]
        if exhausted:
            self._markers = _markers_of(frozenset(self._left.values()))


@lru_cache(maxsize=8)
def _markers_of(needles: frozenset[bytes]) -> Markers:
    """The tables for these needles. Making them takes longer than searching a short log."""
    return Markers(needles)


class _Repeats:
    """Finds blocks of lines that differ from known lines without a needle in their digits alone.

    Most lines of a large log are like others, apart from times and numbers. Comparing them is faster than searching
    them.
    """

    def __init__(self, needles: Iterable[bytes]) -> None:
        # Needles with digits, as they are in the compared lines.
        self._with_digits = [digitless for needle in needles if (digitless := needle.translate(_ONE_DIGIT)) != needle]
        self._known: set[bytes] = set()
        self._fruitless = 0

    def has_only_known(self, block: bytes, markers: Markers) -> bool:
        """Whether no line of the block has a marker, if that can be told from known lines; False if it cannot."""
        if self._fruitless == _MOST_FRUITLESS or len(block) < _SHORTEST_MEAN * block.count(b"\n"):
            return False
        lines = block.translate(_ONE_DIGIT).split(b"\n")
        new = set(lines) - self._known
        if 2 * len(new) > len(lines):
            self._fruitless += 1
            return False
        self._fruitless = 0
        text = b"\n".join(new)
        if any(needle in text for needle in self._with_digits) or next(markers.lines(text), None) is not None:
            return False
        if len(self._known) < _MOST_KNOWN:
            self._known.update(line for line in new if len(line) < _LONGEST_KNOWN)
        return True


def _plain(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-8 or a similar encoding. UTF-16, as Windows PowerShell writes it, is converted."""
    pieces = iter(chunks)
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= _START_BYTES:
            break
    encoding = _utf_16(start[:_START_BYTES])
    if encoding is None:
        yield start
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for piece in chain([start], pieces):
        yield decoder.decode(piece).encode(errors="replace")


def _utf_16(start: bytes) -> str | None:
    """The name of the encoding if a log that starts like this is in UTF-16, else None."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd, most = start[::2].count(b"\0"), start[1::2].count(b"\0"), len(start) * 3 // 8
    return None if max(even, odd) <= most or min(even, odd) > most else "utf-16-be" if even > odd else "utf-16-le"


def _blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Blocks of whole lines that end in a newline, without escape sequences. Only the last one may lack the newline.

    A carriage return of a progress bar also ends a line. Non-breaking spaces, as copied from a web page, become spaces.
    """
    rest, returned = b"", False
    for chunk in chunks:
        if returned:
            chunk = b"\r" + chunk
        returned = chunk.endswith(b"\r")
        data = chunk[:-1] if returned else chunk
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        if not end:
            # The middle of a line that is too long is not kept.
            rest += data[: max(LONGEST_LINE * 2 - len(rest), 0)]
            continue
        yield _cleaned(rest + data[:end])
        rest = data[end:]
    if rest or returned:
        yield _cleaned(rest + b"\n" * returned)


def _cleaned(block: bytes) -> bytes:
    if b"\x1b" in block:
        block = _ESCAPES.sub(b"", block)
    return block.replace(_NO_BREAK_SPACE, b" ") if _NO_BREAK_SPACE in block else block


# Bytes of a window. A table has two groups, with a bit for each byte of a window.
_WIDTH, _NUM_TABLES = 4, 2

# Bytes that are searched at once, so that the integers stay in the processor's cache.
_PART = 64 * 1024
_FIRST_BITS = int.from_bytes(b"\x11" * (_PART + _WIDTH - 1), "little")
_LOWEST_BITS = int.from_bytes(b"\x01" * (_PART + _WIDTH - 1), "little")

# Bytes by how often they occur in logs, the most frequent first; all others are rarer. Windows of rare bytes seldom
# fit.
_FREQUENT = b" etaoinsrhldcu0123456789.mpfg:/,wyb-vk\"'()[]xjqzTIOEANRSPGCDLFMHUBW"
_SHARES = [0.1 * 0.95 ** (_FREQUENT.find(byte) if byte in _FREQUENT else len(_FREQUENT)) for byte in range(256)]


class Markers:
    """Finds the lines with one of `markers`."""

    def __init__(self, markers: Iterable[bytes]) -> None:
        # A marker that has others in it is found with the first of them.
        self._longer: dict[bytes, list[bytes]] = {}
        for marker in sorted(set(markers), key=lambda marker: (len(marker), marker)):
            least = next((other for other in self._longer if other in marker), marker)
            self._longer.setdefault(least, []).append(marker)
        self._size = min([_WIDTH, *map(len, self._longer)])
        self._by_start: dict[bytes, list[tuple[bytes, int]]] = {}
        tables = [bytearray(256) for _ in range(_NUM_TABLES)]
        for marker, offset, group in _windows(self._longer):
            window = marker[offset : offset + _WIDTH]
            self._by_start.setdefault(window[: self._size], []).append((marker, offset))
            for place in range(_WIDTH):
                bit = 1 << (place + _WIDTH * (group % 2))
                # After the end of a marker, every byte fits.
                for byte in window[place : place + 1] or range(256):
                    tables[group // 2][byte] |= bit
        self._tables = [bytes(table) for table in tables]

    def lines(self, block: bytes, end: int = 0) -> Iterator[tuple[int, int]]:
        """The start and the end of each line of the block that has a marker, from the place `end` on."""
        by_start, size = self._by_start, self._size
        for start in range(end, len(block), _PART):
            if end >= start + _PART:
                continue
            # A window may reach into the next part.
            marks = self._marks(block[start : start + _PART + _WIDTH - 1])
            at = marks.find(1, max(end - start, 0))
            while at >= 0:
                place = start + at
                if block[place : place + size] in by_start and self._at(block, place):
                    end = block.find(b"\n", place)
                    end = len(block) if end < 0 else end
                    yield block.rfind(b"\n", 0, place) + 1, end
                    at = end - start - 1
                at = marks.find(1, at + 1)

    def found_in(self, line: bytes) -> set[bytes]:
        """The markers in a line of at most 64 KiB."""
        marks, markers = self._marks(line), set()
        at = marks.find(1)
        while at >= 0:
            markers.update(self._at(line, at))
            at = marks.find(1, at + 1)
        return {marker for least in markers for marker in self._longer[least] if marker in line}

    def _at(self, block: bytes, place: int) -> list[bytes]:
        """The markers with a window at this place, without those that have another marker in them."""
        return [
            marker for marker, offset in self._by_start.get(block[place : place + self._size], ())
            if place >= offset and block.startswith(marker, place - offset)
        ]  # fmt: skip

    def _marks(self, part: bytes) -> bytes:
        """For each byte of the part, 1 if a window may begin there, else 0. Empty if no window does."""
        marks = 0
        # A marker shorter than a window may be at the end. No marker has a newline.
        padded = part + b"\n" * (_WIDTH - 1)
        for table in self._tables:
            bits = int.from_bytes(padded.translate(table), "little")
            # One bit further in the next byte, and then two bits further in the byte after the next.
            bits &= bits >> 9
            bits &= bits >> 18
            marks |= bits & _FIRST_BITS
        return ((marks | marks >> 4) & _LOWEST_BITS).to_bytes(len(part), "little") if marks else b""


def _windows(markers: Iterable[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Each marker, the place in it where its window begins, and its group, so that few other places fit.

    Short markers have few windows, so they should come first.
    """
    classes: list[list[set[int]]] = [[set() for _ in range(_WIDTH)] for _ in range(2 * _NUM_TABLES)]
    shares = [[0.0] * _WIDTH for _ in classes]
    for marker in markers:
        choices = []
        for offset in range(max(len(marker) - _WIDTH, 0) + 1):
            window = marker[offset : offset + _WIDTH]
            for group, (old, has) in enumerate(zip(shares, classes)):
                new = [share + _SHARES[byte] * (byte not in fit) for share, fit, byte in zip(old, has, window)]
                new += [1.0] * (_WIDTH - len(window))
                choices.append((prod(new) - prod(old), offset, group, new))
        _, offset, group, shares[group] = min(choices)
        for fit, byte in zip(classes[group], marker[offset:]):
            fit.add(byte)
        yield marker, offset, group
