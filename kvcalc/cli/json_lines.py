"""Read JSON lines from a file or a pipe as they arrive. A bad line does not affect the others."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, Optional

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple

# Far more than a question needs: it has a few dozen fields at most.
MAX_LINE_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024


class Line(NamedTuple):
    """A line that is not blank: its number, from 1, and its bytes, or None if it is longer than MAX_LINE_BYTES."""

    number: int
    data: Optional[bytes]


def read_lines(stream: BinaryIO) -> Iterator[list[Line]]:
    """The lines of `stream`, in lists of the lines that have arrived so far. Blank lines are skipped but counted.

    A program that writes one line and waits gets its answer without writing more. At most one line and one chunk are
    held in memory.
    """
    number, rest, is_too_long = 0, b"", False
    while True:
        chunk: bytes = stream.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]  # every buffered stream has it
        *whole, rest = (rest + chunk).split(b"\n")
        if not chunk:
            whole, rest = [rest], b""
        lines = []
        for data in whole:
            number += 1
            if is_too_long or len(data) > MAX_LINE_BYTES:
                lines.append(Line(number, None))
            elif data and not data.isspace():
                lines.append(Line(number, data))
            is_too_long = False
        if len(rest) > MAX_LINE_BYTES or (rest and is_too_long) or (is_too_long and not whole):
            rest, is_too_long = b"", True
        if lines:
            yield lines
        if not chunk:
            return


def parse_line(line: Line) -> dict[str, Any]:
    """The JSON object on a line. UsageError (exit 2) if the line is not one, or is ambiguous."""
    if line.data is None:
        raise UsageError(f"the line is longer than {MAX_LINE_BYTES:,} bytes")
    try:
        text = line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise UsageError("not valid UTF-8") from None
    try:
        found = _DECODER.decode(text.strip())
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except _RefusedError as error:
        raise UsageError(error.args[0]) from None
    except ValueError:
        raise UsageError("not JSON: a number has thousands of digits") from None
    if not isinstance(found, dict):
        raise UsageError("not a JSON object", 'write one per line: {"model": "llama-3-70b", "context": 8192}')
    return found


class _RefusedError(Exception):
    """JSON that Python's decoder accepts and kvcalc does not."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _RefusedError(f"the key {twice[:60]!r} occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
