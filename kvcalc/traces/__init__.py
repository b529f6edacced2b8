"""Reads traces of requests: when each one arrived, and how long its prompt and its answer were.

The format is recognised by the first line that is not blank, not by the file's name. A trace is read as it is needed,
in bounded memory: it may have millions of rows. docs/reference/traces.md describes the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from kvcalc.errors import UsageError, nearest
from kvcalc.json_lines import BadLineError, Line, decoded, read_lines
from kvcalc.model.files import chunks_of
from kvcalc.traces import csv_rows, json_rows
from kvcalc.traces.gzip_files import decompressed
from kvcalc.traces.request import BadRowError, Row, TraceRequest

__all__ = ["FORMATS", "Trace", "TraceRequest", "is_csv_header", "read_trace", "rows_text"]

FORMATS = ("csv", "azure", "burstgpt", "mooncake", "qwen", "token-ids")
"""The names of the formats, for `format`."""

_CSV_FORMATS = ("csv", "azure", "burstgpt")
_HINT = (
    "known: CSV with the columns arrival_seconds,prompt_tokens,answer_tokens; the Azure LLM inference traces; "
    "BurstGPT; JSON lines of Mooncake, of Qwen-Bailian, or with prompt_token_ids"
)
_ONE_OF = f"one of {', '.join(FORMATS)}"
# A prompt of a million token ids fits.
_MAX_LINE_BYTES = 8 * 1024 * 1024
_PIPE = "pipe it instead: write - for the file, and add < FILE"


class Trace(Iterator[TraceRequest]):
    """Iterates over the requests of a trace once.

    A row that cannot be read is skipped. `num_requests` and `num_bad_rows` count both kinds of rows so far, and
    `first_bad_row` names the line of the first bad one and says what is wrong with it. `has_arrivals` is False if the
    rows have no times; every `arrival_seconds` is then 0. `format` is set when the first request has been read.

    Raises UsageError (exit 2) if the file cannot be read, if its format is not known, or if no row can be read.
    """

    def __init__(
        self, chunks: Iterable[bytes], name: str, format: str | None = None, block_tokens: int | None = None,
        token_id_block_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.format = format
        self.has_arrivals = True
        self.num_requests = self.num_bad_rows = 0
        self.first_bad_row: str | None = None
        self._block_tokens = block_tokens
        self._token_id_block_tokens = block_tokens or token_id_block_tokens
        self._start: int | None = None
        self._latest = self._latest_line = 0
        self._requests = self._read(read_lines(chunks, _MAX_LINE_BYTES))

    def __next__(self) -> TraceRequest:
        return next(self._requests)

    def reject(self, request: TraceRequest, reason: str) -> None:
        """Count a request that was read, but contradicts others, as a bad row."""
        self.num_requests -= 1
        self._skip(request.line, reason)

    @property
    def bad_rows_text(self) -> str:
        """How many rows were skipped, and what is wrong with the first one."""
        return f"{rows_text(self.num_bad_rows)} skipped; {self.first_bad_row}"

    def _skip(self, line: int, reason: str) -> None:
        self.num_bad_rows += 1
        self.first_bad_row = self.first_bad_row or f"line {line}: {reason}"

    def _read(self, lines: Iterator[Line]) -> Iterator[TraceRequest]:
        first = next(lines, None)
        if first is None:
            raise UsageError(f"{self.name}: empty", _HINT)
        read, has_header = self._reader(first)
        for line in lines if has_header else chain([first], lines):
            try:
                when, prompt, answer, hashes, block_tokens = read(_text(line))
                arrival = self._arrival(when, line.number)
            except BadLineError as error:
                self._skip(line.number, str(error))
                continue
            self.num_requests += 1
            yield TraceRequest(arrival, prompt, answer, hashes, block_tokens, line.number)
        if not self.num_requests:
            if self.first_bad_row is None:
                raise UsageError(f"{self.name}: no request in it")
            bad = rows_text(self.num_bad_rows)
            raise UsageError(f"{self.name}: no row can be read ({bad}); {self.first_bad_row}")

    def _reader(self, first: Line) -> tuple[Callable[[str], Row], bool]:
        """A function from a line to its row, and whether the first line is a header. Sets `format`."""
        try:
            text = _text(first)
            if text.lstrip().startswith("{"):
                columns, row_format = None, json_rows.format_of(json_rows.parse(text))
            else:
                columns = csv_rows.columns_of(text)
                row_format = None if columns is None else csv_rows.format_of(columns)
        except BadLineError as error:
            if self.format is None or self.format in _CSV_FORMATS:
                raise UsageError(f"{self.name}: line {first.number}: {error}", _HINT) from None
            columns, row_format = None, self.format  # a bad row like others
        wanted = self.format or row_format
        if wanted is None or (wanted in _CSV_FORMATS) != (columns is not None):
            what = "in a format that kvcalc knows" if self.format is None else f"in the format {self.format}"
            raise UsageError(f"{self.name}: line {first.number}: not the start of a trace {what}", _HINT)
        self.format = wanted
        if columns is not None:
            return csv_rows.row_reader(columns), True
        size = self._token_id_block_tokens if wanted == "token-ids" else self._block_tokens
        return json_rows.row_reader(wanted, size), False

    def _arrival(self, when: int | None, line: int) -> float:
        """Seconds since the first request. Raises BadRowError if the time goes back."""
        if self._start is None:
            self.has_arrivals = when is not None
            self._start = self._latest = when or 0
        if (when is not None) != self.has_arrivals:
            raise BadRowError("has no time, but earlier rows do" if when is None else "has a time; earlier rows do not")
        if when is None:
            return 0.0
        if when < self._latest:
            seconds = (self._latest - when) / 1e9
            raise BadRowError(f"arrives {seconds:.6g} s before line {self._latest_line}; sort the rows by time")
        self._latest, self._latest_line = when, line
        return (when - self._start) / 1e9


def read_trace(
    path: str, format: str | None = None, block_tokens: int | None = None, token_id_block_tokens: int | None = None
) -> Trace:
    """The requests of the trace at `path`, or on standard input if it is `-`, in the order of the file.

    `format` is one of FORMATS; None recognises it. `block_tokens` is the block size of `hash_ids`, if it is not the
    format's own. A trace with token ids has hashes only if `block_tokens` or, as the default for it,
    `token_id_block_tokens` is given: those of its full blocks.

    Raises UsageError (exit 2) for an unknown format. Reading raises what `Trace` says.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"--trace-format {format[:40]!a}: unknown", nearest(format, FORMATS) or _ONE_OF)
    name = "stdin" if path == "-" else path
    chunks = decompressed(chunks_of(path, hint=_PIPE), name)
    return Trace(chunks, name, format, block_tokens, token_id_block_tokens)


def rows_text(number: int) -> str:
    """A number of rows, such as `1 row`."""
    return f"{number:,} row{'' if number == 1 else 's'}"


def is_csv_header(line: str) -> bool:
    """Whether a line names the columns of a trace as CSV: the time, the prompt and the answer."""
    try:
        return csv_rows.columns_of(line) is not None
    except BadRowError:
        return False


def _text(line: Line) -> str:
    if line.data is None:
        raise BadRowError(f"longer than {_MAX_LINE_BYTES:,} bytes")
    return decoded(line.number, line.data).rstrip("\r")
