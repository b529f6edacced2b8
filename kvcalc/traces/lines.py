"""Splits the bytes of a trace into lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcalc.records import NamedTuple

MAX_LINE_BYTES = 8 * 1024 * 1024
"""A prompt of a million token ids fits."""


class Line(NamedTuple):
    """A line that is not blank: its number, from 1, and its bytes, or None if it is longer than MAX_LINE_BYTES."""

    number: int
    data: bytes | None


def read_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a file that arrives in `chunks`. Blank lines are skipped but counted.

    At most one line of MAX_LINE_BYTES and one chunk are held.
    """
    number = 0
    rest: list[bytes] = []
    size = 0
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        for data in whole:
            number += 1
            if rest:
                size += len(data)
                data = b"".join((*rest, data)) if size <= MAX_LINE_BYTES else data
                rest = []
            else:
                size = len(data)
            if size > MAX_LINE_BYTES:
                yield Line(number, None)
            elif data and not data.isspace():
                yield Line(number, data)
            size = 0
        if last:
            size += len(last)
            # The rest of a line that is too long is counted but not kept.
            rest = [*rest, last] if size <= MAX_LINE_BYTES else [b"-"]
    if size > MAX_LINE_BYTES:
        yield Line(number + 1, None)
    elif rest and not (data := b"".join(rest)).isspace():
        yield Line(number + 1, data)
