"""The lengths of requests: one prompt and one answer, or many from a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, cast

from kvcalc.errors import UsageError
from kvcalc.question.lengths import drawn, lengths_of, longest_of_mean
from kvcalc.question.sessions import Sessions
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

MAX_LENGTHS_BYTES = 256 * 1024 * 1024
_LONGEST_NUMBER = 12
# The requests that a plan draws from a distribution.
_DRAWN = 1000
_EXAMPLE = "write prompt tokens and answer tokens in each row: 2048,500"


class Lengths(NamedTuple):
    """The lengths of requests in tokens.

    `input_tokens` and `output_tokens` are means. A server must take requests of up to `longest_tokens`, prompt and
    answer together, with prompts of up to `longest_prompt`. `reached_tokens` is a length that some requests surely
    have: the longest one of a file or a draw, or the mean if only that is known. `held_tokens` is the number of tokens
    that a running request is assumed to hold on average: its final length, weighted by how long it runs. That time is
    proportional to the length of its answer.
    """

    input_tokens: int
    output_tokens: int
    longest_prompt: int
    longest_tokens: int
    reached_tokens: int
    held_tokens: int
    num_requests: int
    file: str | None = None

    def within(self, limit: int | None) -> Lengths:
        """The lengths cut at a model's limit, unless some requests surely exceed it."""
        if limit is None or self.reached_tokens > limit:
            return self
        longest = min(self.longest_tokens, limit)
        return self._replace(longest_tokens=longest, longest_prompt=min(self.longest_prompt, longest))

    def of_turns(self, sessions: Sessions) -> Lengths:
        """The lengths of all turns of sessions whose first turns have these lengths."""
        more = (sessions.turns - 1) * sessions.growth_tokens
        mean = more // 2  # over all turns
        return self._replace(
            input_tokens=self.input_tokens + mean, longest_prompt=self.longest_prompt + more,
            longest_tokens=self.longest_tokens + more, reached_tokens=self.reached_tokens + more,
            held_tokens=self.held_tokens + mean,
        )  # fmt: skip

    def describe(self) -> documents.PlanLengths:
        """The `lengths` part of a plan's document."""
        hidden = ("longest_prompt", "reached_tokens")
        return cast("documents.PlanLengths", {key: value for key, value in self._asdict().items() if key not in hidden})


def one_length(input_tokens: int | str, output_tokens: int | str) -> Lengths:
    """Requests whose lengths vary around these means. UsageError (exit 2) for a distribution."""
    if isinstance(input_tokens, str) or isinstance(output_tokens, str):
        text = next(one for one in (input_tokens, output_tokens) if isinstance(one, str))
        raise UsageError(f"{text}: a distribution is simulated by kvcalc estimate, plan and simulate", "give a number")
    total, prompt = input_tokens + output_tokens, longest_of_mean(input_tokens)
    return Lengths(input_tokens, output_tokens, prompt, prompt + longest_of_mean(output_tokens), total, total, 1)


def drawn_lengths(input_tokens: int | str, output_tokens: int | str) -> tuple[Lengths, list[tuple[int, int]]]:
    """The lengths of requests that are drawn from distributions, and the prompt and answer tokens of each."""
    prompt, answer = lengths_of(input_tokens, "input_tokens"), lengths_of(output_tokens, "output_tokens")
    if prompt is None or answer is None:
        raise ValueError("no lengths")
    pairs = list(islice(drawn(prompt, answer, 0), _DRAWN))
    lengths = lengths_of_pairs(pairs, f"{prompt.text} + {answer.text}")
    longest = prompt.longest_tokens + answer.longest_tokens
    return lengths._replace(longest_prompt=prompt.longest_tokens, longest_tokens=longest), pairs


def parse_lengths(text: str, name: str) -> Lengths:
    """The lengths in a CSV with two columns, prompt tokens and answer tokens, or in a trace of any known format.

    In a CSV with two columns, a header and blank rows are skipped. The times of a trace do not matter, but its rows
    are in their order. UsageError (exit 2) with the row's number if a row cannot be read or has 0 tokens.
    """
    return lengths_of_pairs(pairs_of(text, name), name)


def lengths_of_pairs(pairs: Iterable[tuple[int, int]], name: str) -> Lengths:
    """The lengths of requests with these prompt and answer tokens. UsageError (exit 2) if there are none."""
    inputs = outputs = held = longest = count = 0
    for prompt, answer in pairs:
        inputs += prompt
        outputs += answer
        held += answer * (prompt + answer)
        longest = max(longest, prompt + answer)
        count += 1
    if not count:
        raise UsageError(f"{name}: no rows with lengths", _EXAMPLE)
    means = _mean(inputs, count), _mean(outputs, count)
    # The longest request may be all prompt.
    return Lengths(*means, longest, longest, longest, -(-held // outputs), count, name)


def pairs_of(text: str, name: str) -> Iterator[tuple[int, int]]:
    """The prompt and answer tokens of every request in a file that `parse_lengths` reads. Raises what it raises."""
    from kvcalc.traces import is_csv_header

    first = text.lstrip("\ufeff\r\n \t").partition("\n")[0]
    is_trace = first.startswith("{") or is_csv_header(first)
    return (_traced if is_trace else _pairs)(text, name)


def _pairs(text: str, name: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        cells = [cell.strip().strip('"').strip() for cell in line.split(",")]
        is_header = number == 1 and len(cells) == 2 and not any(cell[:1].isdecimal() for cell in cells)
        if cells == [""] or is_header:
            continue
        if len(cells) != 2 or not all(cell.isascii() and cell.isdecimal() for cell in cells):
            raise UsageError(f"{name}: row {number} is not two token counts", _EXAMPLE)
        if max(map(len, cells)) > _LONGEST_NUMBER:
            raise UsageError(f"{name}: row {number} has a number with more than {_LONGEST_NUMBER} digits", _EXAMPLE)
        prompt, answer = int(cells[0]), int(cells[1])
        if not prompt or not answer:
            raise UsageError(f"{name}: row {number} has 0 tokens; a prompt and an answer need at least 1", _EXAMPLE)
        yield prompt, answer


def _traced(text: str, name: str) -> Iterator[tuple[int, int]]:
    from kvcalc.traces import Trace

    trace = Trace([text.encode()], name)
    for request in trace:
        if not request.answer_tokens:
            raise UsageError(f"{name}: row {request.line} has no answer", "remove the requests that got no answer")
        yield request.prompt_tokens, request.answer_tokens
    if trace.first_bad_row is not None:
        raise UsageError(f"{name}: {trace.first_bad_row}", "remove or repair the row")


def _mean(total: int, count: int) -> int:
    return max(1, (2 * total + count) // (2 * count))
