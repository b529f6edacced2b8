"""The requests of a simulation, and the distributions of their lengths."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt
from random import Random

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.units import Number, check_count, parse_tokens

Draw = Callable[[Random], int]
"""Draws one length in tokens."""

_EXAMPLE = "write 1000, uniform:100..2000, or lognormal:1000,0.5 (the mean, and the deviation relative to the mean)"
# A length is cut here, so that a wide distribution does not draw one that no model has.
_LONGEST = 2**27


class Request:
    """One request, and what happened to it.

    `cached_tokens` of its tokens are found in the prefix cache; when it first runs, these are `found_tokens`. `names`
    are those of the whole blocks of its prompt, of which it shares the first `shared`. `given_tokens` are found without
    a look at the blocks, if all named ones are found. `held` are the units of its own, `extra` those of its prompt that
    it does not need to decode, and `kept` is the number under which the cache keeps those that it gave back. `computed`
    is the number of tokens
    whose cache exists, and `target` the number that a prefill computes: the prompt and, after a preemption, the answer
    so far. While it decodes, it holds the cache of `key` + steps tokens, where steps counts the decode steps of the
    replica. Times are those of the engine, in seconds from the start; None until they happen. The client gets every
    token `lag` seconds later.
    """

    __slots__ = (
        "answer_tokens", "arrival", "cached_tokens", "computed", "extra", "finish", "finish_step", "first_token",
        "found_tokens", "given_tokens", "held", "kept", "key", "lag", "last_token", "names", "number", "outputs",
        "preemptions", "prompt_tokens", "shared", "started", "target",
    )  # fmt: skip

    def __init__(
        self, number: int, arrival: float, prompt_tokens: int, answer_tokens: int, cached_tokens: int = 0,
        names: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.number, self.arrival, self.lag = number, arrival, 0.0
        self.prompt_tokens, self.answer_tokens, self.cached_tokens = prompt_tokens, answer_tokens, cached_tokens
        self.given_tokens = cached_tokens
        self.names, self.shared, self.kept, self.found_tokens = names, 0, 0, 0
        self.target, self.computed, self.outputs, self.held = prompt_tokens, 0, 0, 0
        self.extra = 0
        self.key, self.finish_step, self.preemptions = 0, -1, 0
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finish: float | None = None

    @property
    def total_tokens(self) -> int:
        """The prompt and the whole answer."""
        return self.prompt_tokens + self.answer_tokens


class Lengths(NamedTuple):
    """A distribution of lengths as it was written, its mean, its longest length, and how to draw from it."""

    text: str
    mean_tokens: float
    longest_tokens: int | None
    draw: Draw


def lengths_of(tokens: int | str | None, name: str) -> Lengths | None:
    """The distribution of a number or of text (`parse_distribution`). None if there is none."""
    if isinstance(tokens, int):
        check_count(tokens, name)
        return _fixed(tokens)
    return None if tokens is None else parse_distribution(tokens, name)


def parse_distribution(text: str, option: str) -> Lengths:
    """The distribution in `1000`, `uniform:100..2000` or `lognormal:1000,0.5`.

    UsageError (exit 2) for anything else.
    """
    if isinstance(text, Number):
        return _fixed(parse_tokens(text, option))
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return _fixed(parse_tokens(text, option))
    if kind == "uniform":
        low, dots, high = rest.partition("..")
        if dots:
            return _uniform(parse_tokens(low, option), parse_tokens(high, option), text, option)
    elif kind == "lognormal":
        mean, comma, spread = rest.partition(",")
        if comma:
            return _lognormal(parse_tokens(mean, option), _spread(spread, text, option), text)
    raise UsageError(f"{option} {text[:60]!a}: not a length or a distribution", _EXAMPLE)


def _fixed(tokens: int) -> Lengths:
    return Lengths(str(tokens), tokens, tokens, lambda _: tokens)


def _uniform(low: int, high: int, text: str, option: str) -> Lengths:
    if low > high:
        raise UsageError(f"{option} {text[:60]!a}: the first length is longer than the second", _EXAMPLE)
    return Lengths(text, (low + high) / 2, high, lambda random: random.randint(low, high))


def _lognormal(mean: int, spread: float, text: str) -> Lengths:
    sigma = sqrt(log(1 + spread * spread))
    middle = log(mean) - sigma * sigma / 2

    def draw(random: Random) -> int:
        return min(max(1, round(exp(random.gauss(middle, sigma)))), _LONGEST)

    return Lengths(text, mean, None, draw)


def _spread(text: str, whole: str, option: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 100:
        raise UsageError(f"{option} {whole[:60]!a}: the deviation must be above 0 and at most 100", _EXAMPLE)
    return found
