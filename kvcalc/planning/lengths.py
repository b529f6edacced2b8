"""The lengths of requests: one prompt and one answer, or many from a file."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.errors import UsageError

MAX_LENGTHS_BYTES = 256 * 1024 * 1024
_LONGEST_NUMBER = 12


class Lengths(NamedTuple):
    """Requests as a planner needs them, in tokens.

    `input_tokens` and `output_tokens` are the means. `longest_tokens` is the longest prompt and answer together: one
    request of it must fit. `held_tokens` is what a running request holds when its answer ends, the mean over the time
    requests run, which is as their answers are long: so much is reckoned for each of many.
    """

    input_tokens: int
    output_tokens: int
    longest_tokens: int
    held_tokens: int
    num_requests: int
    file: str | None = None


def one_length(input_tokens: int, output_tokens: int) -> Lengths:
    """Requests that are all alike."""
    total = input_tokens + output_tokens
    return Lengths(input_tokens, output_tokens, total, total, 1)


def parse_lengths(text: str, name: str) -> Lengths:
    """The rows `prompt,answer` of a CSV in tokens; a first row of words is a header, blank rows are passed over.

    UsageError (exit 2) with the row's number where one is not two whole numbers, the answer at least 1.
    """
    inputs = outputs = held = longest = count = 0
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip().strip('"').strip() for cell in line.split(",")]
        is_header = number == 1 and len(cells) == 2 and not any(cell[:1].isdecimal() for cell in cells)
        if cells == [""] or is_header:
            continue
        if len(cells) != 2 or not all(cell.isascii() and cell.isdecimal() for cell in cells):
            raise UsageError(f"{name}: row {number}: not a prompt's and an answer's tokens", "one pair a row: 2048,500")
        if max(map(len, cells)) > _LONGEST_NUMBER:
            raise UsageError(f"{name}: row {number}: more tokens than any request has")
        prompt, answer = int(cells[0]), int(cells[1])
        if not prompt or not answer:
            raise UsageError(f"{name}: row {number}: a prompt and an answer have at least 1 token each")
        inputs += prompt
        outputs += answer
        held += answer * (prompt + answer)
        longest = max(longest, prompt + answer)
        count += 1
    if not count:
        raise UsageError(f"{name}: no row of lengths", "one pair a row: 2048,500")
    return Lengths(_mean(inputs, count), _mean(outputs, count), longest, -(-held // outputs), count, name)


def _mean(total: int, count: int) -> int:
    return max(1, (2 * total + count) // (2 * count))
