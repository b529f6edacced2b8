"""The questions of a batch: JSON objects, one a line. A bad line does not affect the others."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from kvcalc.errors import UsageError
from kvcalc.json_lines import NOT_AN_OBJECT, BadLineError, Line, decoded, parse_object, read_lines, refuse_constant

# Far more than a question needs: it has a few dozen fields at most.
MAX_LINE_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024


def lines_of(stream: BinaryIO) -> Iterator[Line]:
    """The lines of `stream`. A program that writes one line and waits gets its answer without writing more."""
    read1 = stream.read1  # type: ignore[attr-defined]  # every buffered stream has it
    return read_lines(iter(lambda: read1(_CHUNK_BYTES), b""), MAX_LINE_BYTES)


def parse_line(line: Line) -> dict[str, Any]:
    """The JSON object on a line. UsageError (exit 2) if the line is not one, or is ambiguous."""
    if line.data is None:
        raise UsageError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        text = decoded(line.number, line.data).strip()
        return parse_object(text, _DECODER)
    except BadLineError as error:
        reason = str(error)
        hint = 'write one per line: {"model": "llama-3-70b", "context": 8192}' if reason == NOT_AN_OBJECT else None
        raise UsageError(reason, hint) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLineError(f"the key {twice[:60]!r} occurs twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=refuse_constant)
