"""Find the few lines of a log that may matter, in one pass and little memory.

A log may have gigabytes of requests after a start of a few hundred lines. The log is read in blocks, which are
searched for the needles of all patterns at once. Only lines with a needle are decoded.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from kvcalc.planning.logs.markers import Markers
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
        self._markers = Markers(self._left.values())
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
            self._markers = Markers(self._left.values())


class _Repeats:
    """Finds blocks of lines that differ from known lines without a needle in their digits alone.

    Most lines of a large log are like others, apart from times and numbers. Comparing them is faster than searching
    them.
    """

    def __init__(self, needles: Iterable[bytes]) -> None:
        # Needles with digits, as they are in the compared lines.
        self._with_digits = [one for needle in needles if (one := needle.translate(_ONE_DIGIT)) != needle]
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
