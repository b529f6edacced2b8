"""Traces as CSV: kvcalc's plain form, Azure's LLM inference traces, and BurstGPT.

The first line names the columns. Their order does not matter, and other columns are ignored.

- Azure (AzurePublicDataset, AzureLLMInferenceDataset2023.md and ...2024.md): TIMESTAMP, ContextTokens,
  GeneratedTokens. A TIMESTAMP has a date, seven digits of a second in 2023, and a time zone in 2024.
- BurstGPT (HPMLL/BurstGPT, README.md): Timestamp in seconds, Model, Request tokens, Response tokens, Total tokens,
  Log Type; later files add Session ID and Elapsed time. A failed request has 0 response tokens.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping

from kvcalc.records import NamedTuple
from kvcalc.traces.request import BadRowError, Row, nanoseconds, shown, tokens

# Names of columns, in lower case and with _ between words.
ARRIVAL = ("arrival_seconds", "arrival", "arrival_time", "arrived_at", "timestamp", "time")
ARRIVAL_MILLISECONDS = ("arrival_ms", "timestamp_ms")
PROMPT = ("prompt_tokens", "input_tokens", "input_length", "prompt", "contexttokens", "request_tokens")
ANSWER = ("answer_tokens", "output_tokens", "output_length", "answer", "generatedtokens", "response_tokens")

_DELIMITERS = ",;\t"
_LONGEST_ROW = 64 * 1024


class Columns(NamedTuple):
    """Where a CSV file has the three values, and the names of their columns. `num_columns` counts all of them."""

    delimiter: str
    num_columns: int
    arrival: int
    prompt: int
    answer: int
    names: tuple[str, str, str]
    per_second: int


def columns_of(header: str) -> Columns | None:
    """The columns that the first line of a file names, or None if it does not name the three that are needed."""
    if len(header) > _LONGEST_ROW:
        return None
    delimiter = max(_DELIMITERS, key=header.count)
    names = [name.strip() for name in _split(header, delimiter)]
    plain = {
        name.casefold().replace(" ", "_").replace("-", "_"): place for place, name in reversed([*enumerate(names)])
    }
    milliseconds = _first(plain, ARRIVAL_MILLISECONDS)
    arrival, per_second = (_first(plain, ARRIVAL), 1) if milliseconds is None else (milliseconds, 1000)
    prompt, answer = _first(plain, PROMPT), _first(plain, ANSWER)
    if arrival is None or prompt is None or answer is None:
        return None
    shown_names = (names[arrival], names[prompt], names[answer])
    return Columns(delimiter, len(names), arrival, prompt, answer, shown_names, per_second)


def format_of(columns: Columns) -> str:
    """The name of the format that has these columns: azure, burstgpt or csv."""
    if columns.names == ("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        return "azure"
    return "burstgpt" if columns.names == ("Timestamp", "Request tokens", "Response tokens") else "csv"


def row_reader(columns: Columns) -> Callable[[str], Row]:
    """A function from a line to its row. It raises BadRowError."""
    delimiter, num_columns, arrival, prompt, answer, names, per_second = columns

    def read(line: str) -> Row:
        if len(line) > _LONGEST_ROW:
            raise BadRowError(f"longer than {_LONGEST_ROW:,} characters")
        cells = line.split(delimiter) if '"' not in line else _split(line, delimiter)
        if len(cells) != num_columns:
            raise BadRowError(f"{len(cells)} values, but the header has {num_columns} columns")
        return Row(
            nanoseconds(cells[arrival].strip(), names[0], per_second),
            tokens(cells[prompt].strip(), names[1], 1),
            tokens(cells[answer].strip(), names[2], 0),
        )

    return read


def _split(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        raise BadRowError(f"not CSV: {shown(line)}") from None


def _first(places: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    return next((places[name] for name in names if name in places), None)
