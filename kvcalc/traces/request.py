"""What the formats of traces share: a request, and the checks of the values that a row states."""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache

from kvcalc.json_lines import BadLineError
from kvcalc.records import NamedTuple

# Far more than any context or answer has. Larger numbers are damage, or hostile.
MOST_TOKENS = 1_000_000_000
# 300 years in seconds. Times are kept in nanoseconds, as whole numbers, until the first one is subtracted.
_MOST_SECONDS = 10_000_000_000
_NANOSECONDS = 1_000_000_000
_LONGEST_SHOWN = 40

_DATE_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?\s*(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_NUMBER = re.compile(r"\d{1,15}(?:\.(\d{0,30}))?(?:[eE][+-]?\d{1,2})?", re.ASCII)
_COUNT = re.compile(r"(\d{1,15})(?:\.0{0,3})?", re.ASCII)


class TraceRequest(NamedTuple):
    """One request of a trace.

    `arrival_seconds` counts from the first request of the trace and never decreases. `prompt_tokens` is at least 1.
    `answer_tokens` is 0 if the service failed to answer (BurstGPT has such rows), or if the trace does not state it.

    `block_hashes` names the blocks of `block_tokens` tokens that the prompt consists of, from its start. Two prompts
    share a block if they have the same name at the same place. None if the trace says nothing about shared prefixes.
    `line` is the number of the row's line in the file, from 1.
    """

    arrival_seconds: float
    prompt_tokens: int
    answer_tokens: int
    block_hashes: tuple[int, ...] | None
    block_tokens: int | None
    line: int


class BadRowError(BadLineError):
    """A row that states no request."""


def tokens(value: object, name: str, least: int) -> int:
    """A number of tokens: a whole number, or text such as `472` or `472.0`. BadRowError if it is not."""
    if isinstance(value, str):
        match = _COUNT.fullmatch(value)
        count = int(match[1]) if match else None
    elif isinstance(value, float):
        count = int(value) if value.is_integer() else None
    else:
        count = value if isinstance(value, int) and not isinstance(value, bool) else None
    if count is None:
        raise BadRowError(f"{name} is {shown(value)}, not a whole number")
    if not least <= count <= MOST_TOKENS:
        raise BadRowError(f"{name} is {count}; it must be from {least} to {MOST_TOKENS:,}")
    return count


def nanoseconds(value: object, name: str, per_second: int = 1) -> int:
    """A time in nanoseconds: a number, of which `per_second` are a second, or a date and time.

    BadRowError if it is neither, or negative, infinite or not a number.
    """
    if isinstance(value, str):
        match = _DATE_TIME.fullmatch(value)
        if match:
            return _date_time(match, name)
        if _NUMBER.fullmatch(value) is None:
            raise BadRowError(f"{name} is {shown(value)}, not a time")
        value = float(value) if "." in value or "e" in value.casefold() else int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRowError(f"{name} is {shown(value)}, not a time")
    if not 0 <= value <= _MOST_SECONDS * per_second:  # refuses nan too
        raise BadRowError(f"{name} is {shown(value)}; it must be from 0 to {_MOST_SECONDS * per_second:,}")
    return value * (_NANOSECONDS // per_second) if isinstance(value, int) else round(value * _NANOSECONDS / per_second)


def shown(value: object) -> str:
    """A value as it is quoted in an error: without control characters, and not long."""
    text = ascii(value) if isinstance(value, (str, int, float)) or value is None else type(value).__name__
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _date_time(match: re.Match[str], name: str) -> int:
    year, month, day, hours, minutes, seconds, fraction, sign, zone_hours, zone_minutes = match.groups()
    days = _days(year, month, day)
    if days is None or int(hours) > 23 or int(minutes) > 59 or int(seconds) > 60:
        raise BadRowError(f"{name} is {shown(match[0])}, not a date and time")
    whole = ((days * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    if sign:
        offset = int(zone_hours) * 3600 + int(zone_minutes) * 60
        whole += offset if sign == "-" else -offset
    return whole * _NANOSECONDS + int((fraction or "0").ljust(9, "0"))


@lru_cache(maxsize=64)
def _days(year: str, month: str, day: str) -> int | None:
    try:
        return date(int(year), int(month), int(day)).toordinal()
    except ValueError:
        return None


class Row(NamedTuple):
    """What one row states, before it has a place in the trace. `nanoseconds` is None if the row has no time."""

    nanoseconds: int | None
    prompt_tokens: int
    answer_tokens: int
    block_hashes: tuple[int, ...] | None = None
    block_tokens: int | None = None
