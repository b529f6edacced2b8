"""Traces that are compressed with gzip. They are recognised by their first bytes, not by their name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from kvcalc.errors import UsageError

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
                text = member.decompress(data, _MOST_BYTES)
                data = member.unused_data if member.eof else member.unconsumed_tail
                yield text
        yield member.flush()
    except zlib.error as error:
        raise UsageError(f"{name}: not a gzip file that can be read: {error}") from None
    if not member.eof:
        raise UsageError(f"{name}: the gzip file is not complete", "copy it again")
