"""Expected values of random choices: how many of the experts tokens choose, and the largest of several numbers."""

from __future__ import annotations

from functools import lru_cache
from math import erf

_NORMAL_END, _NORMAL_STEP = 8.0, 0.1  # standard deviations


def distinct_experts(experts: float, read: float, tokens: float) -> float:
    """The expected number of distinct experts in one layer for `tokens` tokens: E (1 - (1 - k/E)^n).

    Every token chooses `read` of the `experts` with equal probability. All may be arrays.
    """
    missed: float = (1.0 - read / experts) ** tokens
    return experts * (1.0 - missed)


@lru_cache(maxsize=256)
def largest_normal(number: int) -> float:
    """The mean of the largest of `number` standard normal variables: 0 for 1, 0.56 for 2, 1.03 for 4, 1.42 for 8."""
    if number == 1:
        return 0.0
    # The mean of a variable is the integral of P(X > x) over x > 0, less that of P(X < x) over x < 0.
    points = [_NORMAL_STEP * (i + 0.5) for i in range(round(_NORMAL_END / _NORMAL_STEP))]
    below = [((1 + erf(x / 2**0.5)) / 2) ** number for x in points]
    above = [((1 - erf(x / 2**0.5)) / 2) ** number for x in points]
    return _NORMAL_STEP * (sum(1 - chance for chance in below) - sum(above))
