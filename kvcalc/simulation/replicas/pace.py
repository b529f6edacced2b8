"""How many tokens each decode step gives a sequence: one, or several if tokens are drafted.

With an acceptance length of L, the first n steps give floor(n x L) tokens to every sequence that decodes in all of
them. So the mean is exact, and which sequence has more accepted tokens in one step is not drawn.
"""

from __future__ import annotations

from copy import copy
from fractions import Fraction


class Pace:
    """The tokens of the coming steps. `per_step` is their mean, at least 1."""

    def __init__(self, per_step: Fraction = Fraction(1)) -> None:
        self._p, self._q = per_step.as_integer_ratio()
        self._done = 0  # the steps so far, modulo the denominator
        self._given = 0  # the tokens of these steps
        self.next = self._p // self._q  # the tokens of the next step
        self.last = -(-self._p // self._q)  # the tokens of the step before

    @property
    def mean_tokens(self) -> float:
        """The mean number of tokens of a step."""
        return self._p / self._q

    def tokens(self, steps: int) -> int:
        """The tokens of the next `steps` steps."""
        return (self._done + steps) * self._p // self._q - self._given

    def steps_within(self, tokens: int) -> int:
        """The most steps that give at most `tokens` tokens."""
        return ((self._given + tokens + 1) * self._q - 1) // self._p - self._done

    def until(self, tokens: int) -> tuple[int, int]:
        """The fewest steps that give at least `tokens` tokens, and what they give."""
        steps = -(-(self._given + tokens) * self._q // self._p) - self._done
        return steps, (self._done + steps) * self._p // self._q - self._given

    def summed(self, steps: int) -> int:
        """The sum of the tokens before each of the next `steps` steps: 0 + tokens(1) + ... + tokens(steps - 1)."""
        if self._q == 1:
            return self._p * (steps * (steps - 1) // 2)
        return _floor_sum(steps, self._q, self._p, self._done * self._p) - steps * self._given

    def after(self, steps: int) -> Pace:
        """The tokens that come after the next `steps` steps."""
        if self._q == 1:
            return self  # all steps give the same
        pace = copy(self)
        pace.advance(steps)
        return pace

    def advance(self, steps: int) -> int:
        """`steps` steps run. Returns their tokens."""
        tokens = (self._done + steps) * self._p // self._q - self._given
        if self._q > 1:
            self._done = (self._done + steps) % self._q
            self._given = self._done * self._p // self._q
            self.next = self.tokens(1)
            self.last = self._given - (self._done - 1) * self._p // self._q
        return tokens


def _floor_sum(number: int, divisor: int, factor: int, offset: int) -> int:
    """The sum of floor((factor x i + offset) / divisor) for i from 0 to number - 1, by Euclid's algorithm."""
    total = 0
    while number:
        total += number * (number - 1) // 2 * (factor // divisor) + number * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        top = factor * number + offset
        if top < divisor:
            break
        number, offset = divmod(top, divisor)
        divisor, factor = factor, divisor
    return total
