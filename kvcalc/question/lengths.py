"""The lengths of prompts and answers: a number, or a distribution from which requests are drawn.

A number is the mean of lengths that vary by a third, as most benchmarks' do. `fixed:1000` says that all lengths are
equal. Lengths end at their 99.9th percentile, so that a server can be started for the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import ceil, erf, exp, log, sqrt
from random import Random

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.units import Number, check_count, parse_tokens

Draw = Callable[[Random], int]
"""Draws one length in tokens."""

_EXAMPLE = "write 1000, fixed:1000, uniform:100..2000, or lognormal:1000,0.5 (the mean, and its relative deviation)"
# A length is cut here, so that a wide distribution does not draw one that no model has.
_LONGEST = 2**27
# The 99.9th percentile of a normal distribution in standard deviations, and the deviation of lengths with a mean only,
# relative to how much longer than one token they are.
_UPPER_END, _DEVIATION = 3.0902, 1 / 3


class Distribution(NamedTuple):
    """A distribution of lengths as it was written, its mean, its longest and shortest length, and how to draw from it.

    `text` is what `--input-tokens` takes.
    """

    text: str
    mean_tokens: float
    longest_tokens: int
    draw: Draw
    shortest_tokens: int = 1


def longest_of_mean(mean_tokens: int) -> int:
    """The longest of lengths that vary around a mean by a third, as a normal distribution does."""
    return mean_tokens + ceil((mean_tokens - 1) * _UPPER_END * _DEVIATION)


def lengths_of(tokens: int | str | None, name: str) -> Distribution | None:
    """The distribution of a number or of text (`parse_distribution`). None if there is none."""
    if isinstance(tokens, int):
        check_count(tokens, name)
        return _around(tokens)
    return None if tokens is None else parse_distribution(tokens, name)


def parse_distribution(text: str, option: str) -> Distribution:
    """The distribution in `1000`, `fixed:1000`, `uniform:100..2000` or `lognormal:1000,0.5`.

    UsageError (exit 2) for anything else.
    """
    if isinstance(text, Number):
        return _around(parse_tokens(text, option))
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return _around(parse_tokens(text, option))
    if kind == "fixed":
        return _fixed(parse_tokens(rest, option))._replace(text=text)
    if kind == "uniform":
        low, dots, high = rest.partition("..")
        if dots:
            return _uniform(parse_tokens(low, option), parse_tokens(high, option), text, option)
    elif kind == "lognormal":
        mean, comma, spread = rest.partition(",")
        if comma:
            return _lognormal(parse_tokens(mean, option), _spread(spread, text, option), text)
    raise UsageError(f"{option} {text[:60]!a}: not a length or a distribution", _EXAMPLE)


def drawn(prompt: Distribution, answer: Distribution, seed: int) -> Iterator[tuple[int, int]]:
    """The prompt and answer tokens of requests, without end. The same seed draws the same ones."""
    random = Random(seed + 1)  # noqa: S311 - not for secrets
    while True:
        yield prompt.draw(random), answer.draw(random)


@lru_cache(maxsize=64)
def known_lengths(tokens: int | str) -> Distribution:
    """The distribution of a value that has already been checked."""
    return _around(tokens) if isinstance(tokens, int) else parse_distribution(tokens, "tokens")


def _around(mean: int) -> Distribution:
    """Lengths that vary by a third. One token is the shortest answer, so a mean of one is that of equal lengths."""
    deviation, longest = (mean - 1) * _DEVIATION, longest_of_mean(mean)

    def draw(random: Random) -> int:
        return min(max(1, round(random.gauss(mean, deviation))), longest)

    return Distribution(str(mean), mean, longest, draw)


def _fixed(tokens: int) -> Distribution:
    return Distribution(f"fixed:{tokens}", tokens, tokens, lambda _: tokens, tokens)


def _uniform(low: int, high: int, text: str, option: str) -> Distribution:
    if low > high:
        raise UsageError(f"{option} {text[:60]!a}: the first length is longer than the second", _EXAMPLE)
    return Distribution(text, (low + high) / 2, high, lambda random: random.randint(low, high), low)


def _lognormal(mean: int, spread: float, text: str) -> Distribution:
    sigma = sqrt(log(1 + spread * spread))
    middle = log(mean) - sigma * sigma / 2
    longest = min(ceil(exp(middle + _UPPER_END * sigma)), _LONGEST)

    def draw(random: Random) -> int:
        return min(max(1, round(exp(random.gauss(middle, sigma)))), longest)

    # What is longer than the longest length counts as that.
    below = _below(_UPPER_END - sigma)
    cut = mean * below + longest * (1 - _below(_UPPER_END))
    return Distribution(text, min(cut, mean), longest, draw)


def _below(deviations: float) -> float:
    """The share of a normal distribution below its mean plus so many standard deviations."""
    return (1 + erf(deviations / sqrt(2))) / 2


def _spread(text: str, whole: str, option: str) -> float:
    try:
        spread = float(text)
    except ValueError:
        spread = 0.0
    if not 0 < spread <= 100:
        raise UsageError(f"{option} {whole[:60]!a}: the deviation must be above 0 and at most 100", _EXAMPLE)
    return spread
