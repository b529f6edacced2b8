"""Lines of text from a file or a pipe, read as they arrive in bounded memory, and the JSON objects on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from kvcalc.records import NamedTuple

NOT_AN_OBJECT = "not a JSON object"


class BadLineError(Exception):
    """A line that cannot be read. The message says what is wrong with it; the reader adds its number."""


class Line(NamedTuple):
    """A line that is not blank: its number, from 1, and its bytes, or None if it is too long."""

    number: int
    data: bytes | None


def read_lines(chunks: Iterable[bytes], most_bytes: int) -> Iterator[Line]:
    """Yield the lines of a file that arrives in `chunks`, each when it is complete.

    Blank lines are counted, but not returned. At most one line of `most_bytes` and one chunk are held.
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
                data = b"".join((*rest, data)) if size <= most_bytes else data
                rest = []
            else:
                size = len(data)
            if size > most_bytes:
                yield Line(number, None)
            elif data and not data.isspace():
                yield Line(number, data)
            size = 0
        if last:
            size += len(last)
            # Of a line that is too long, only the size is kept.
            rest = [*rest, last] if size <= most_bytes else [b"-"]
    if size > most_bytes:
        yield Line(number + 1, None)
    elif rest and not (data := b"".join(rest)).isspace():
        yield Line(number + 1, data)


def decoded(number: int, data: bytes) -> str:
    """The text of the line with this number. Raises BadLineError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise BadLineError("not valid UTF-8") from None


def parse_object(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """The JSON object in a text. Raises BadLineError if there is none. `decoder` may refuse more than Python's."""
    try:
        found = decoder.decode(text)
    except RecursionError:
        raise BadLineError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadLineError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueError:
        raise BadLineError("not JSON: a number has thousands of digits") from None
    if not isinstance(found, dict):
        raise BadLineError(NOT_AN_OBJECT)
    return found


def refuse_constant(name: str) -> Any:
    """For a decoder's `parse_constant`: NaN and Infinity are not valid JSON."""
    raise BadLineError(f"{name} is not valid JSON")
