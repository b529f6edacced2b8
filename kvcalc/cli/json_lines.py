"""Lines of JSON objects, as they come: from any file or pipe, each line alone right or wrong."""

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, Optional

from kvcalc.errors import UsageError

# A question has some dozen fields.
MAX_LINE_BYTES = 1024 * 1024

_CHUNK_BYTES = 64 * 1024


class Line(NamedTuple):
    """One line that is not blank: its number from 1, and its bytes, None where it is longer than any question."""

    number: int
    data: Optional[bytes]


def read_lines(stream: BinaryIO) -> Iterator[list[Line]]:
    """The lines of `stream`, all that have come at once; blank ones are passed over, but counted.

    Whoever writes one line and waits gets it at once. Never more than one line and one chunk is held.
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
    """The object a line holds. UsageError (exit 2) where it holds none, or one that is not to be trusted."""
    if line.data is None:
        raise UsageError(f"a line of more than {MAX_LINE_BYTES:,} bytes, and no question needs so many")
    try:
        text = line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise UsageError("not a text (no UTF-8)") from None
    try:
        found = _DECODER.decode(text.strip())
    except RecursionError:
        raise UsageError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except _RefusedError as error:
        raise UsageError(error.args[0]) from None
    except ValueError:
        raise UsageError("not JSON: a number of thousands of digits") from None
    if not isinstance(found, dict):
        raise UsageError("not a JSON object", 'write one a line: {"model": "llama-3-70b", "context": 8192}')
    return found


class _RefusedError(Exception):
    """Well formed for Python's reader, and not for us."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _RefusedError(f"{twice[:60]!r} stands twice")
    return found


def _no_constant(name: str) -> Any:
    raise _RefusedError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
