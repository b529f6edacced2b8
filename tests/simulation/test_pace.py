"""The tokens of steps that give a fraction of a token more than one, against counting step by step."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest

from kvcalc.simulation.replicas.pace import Pace
from kvcalc.simulation.replicas.times import Line, run_seconds, steps_until


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
            fewest = min(n for n in range(40) if sum(steps[:n]) >= tokens)
            assert pace.until(tokens) == (fewest, sum(steps[:fewest]))
        further = random.randint(1, 30)
        later = pace.after(further)
        assert later.tokens(5) == pace.tokens(further + 5) - pace.tokens(further)
        assert later.last == pace.tokens(further) - pace.tokens(further - 1)
        pace.advance(further)
        ran += further
        assert pace.tokens(7) == later.tokens(7)


@pytest.mark.parametrize("seed", range(20))
def test_the_steps_until_a_request_arrives_are_the_fewest_that_end_then_or_later(seed: int) -> None:
    random = Random(seed)
    for _ in range(20):
        each = 1 + Fraction(random.choice((0, 0, 3, 7)), random.choice((1, 4)))
        pace, batch, context = Pace(each).after(random.randrange(9)), random.randrange(1, 9), random.randrange(500)
        line = Line(random.randrange(4) / 64, random.randrange(4) / 4096, 2**40)
        ends = [run_seconds(line, batch, context, steps, pace) for steps in range(200)]
        now = random.randrange(100) / 8
        # Between the ends of two steps, at one, and later than all.
        first = random.randrange(1, 199)
        for until in (now + (ends[first - 1] + ends[first]) / 2, now + ends[first], now + ends[-1] + 1):
            expected = next((n for n in range(1, 200) if now + ends[n] >= until), 199)
            assert steps_until(line, batch, context, now, until, 199, pace) == expected
