"""Splits the bytes of a trace into lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvcalc.errors import UsageError
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


# Traces that are compressed with gzip. They are recognised by their first bytes, not by their name.

_MAGIC = b"\x1f\x8b"
# RFC 1952's header and checksum, for zlib.
_GZIP = 31
_MOST_BYTES = 1 << 20  # at a time, so that a small file cannot take much memory


def decompressed(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """The bytes of a file, decompressed if it is in gzip's format. `name` is for errors.

    Raises UsageError (exit 2) if the compressed file is damaged or incomplete.
    """
    pieces = iter(chunks)
    first = next(pieces, b"")
    pieces = chain([first], pieces)
    yield from _members(pieces, name) if first.startswith(_MAGIC) else pieces


def _members(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The bytes of all members of a file. There may be several, such as the joined parts of a rotated log."""
    import zlib

    member, data = zlib.decompressobj(_GZIP), b""
    try:
        for piece in pieces:
            data += piece
            while data:
                if member.eof:
                    member = zlib.decompressobj(_GZIP)
                found = member.decompress(data, _MOST_BYTES)
                data = member.unused_data if member.eof else member.unconsumed_tail
                yield found
        yield member.flush()
    except zlib.error as error:
        raise UsageError(f"{name}: not a gzip file that can be read: {error}") from None
    if not member.eof:
        raise UsageError(f"{name}: the gzip file is not complete", "copy it again")
