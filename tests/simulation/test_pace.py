"""The tokens of steps that give a fraction of a token more than one, against counting step by step."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest

from kvcalc.simulation.replicas.pace import Pace


@pytest.mark.parametrize("seed", range(20))
def test_what_many_steps_give_is_the_sum_of_single_ones(seed: int) -> None:
    random = Random(seed)
    each = 1 + Fraction(random.randint(0, 9), random.choice((1, 3, 4, 100)))
    pace, ran = Pace(each), 0
    for _ in range(4):
        # After n steps, n x `each` tokens have been given, rounded down.
        totals = [int((ran + step) * each) for step in range(40)]
        steps = [after - before for before, after in pairwise(totals)]
        for number in range(len(steps)):
            assert pace.tokens(number) == sum(steps[:number])
            assert pace.summed(number) == sum(sum(steps[:done]) for done in range(number))
        for tokens in range(sum(steps) // 2):
            assert pace.steps_within(tokens) == max(n for n in range(40) if sum(steps[:n]) <= tokens)
            assert pace.steps_for(tokens) == min(n for n in range(40) if sum(steps[:n]) >= tokens)
        further = random.randint(1, 30)
        later = pace.after(further)
        assert later.tokens(5) == pace.tokens(further + 5) - pace.tokens(further)
        assert later.last_tokens() == pace.tokens(further) - pace.tokens(further - 1)
        pace.advance(further)
        ran += further
        assert pace.tokens(7) == later.tokens(7)
