"""The rate of a closed loop, at which Little's law holds, and prompts in steps of their own."""

from __future__ import annotations

from collections import deque
from random import Random
from statistics import mean

import pytest

from kvcalc.throughput.scheduling import Waits, batches
from tests.rows import every_row


def in_system(waits: Waits, clients: int, seconds: float, rate: float) -> float:
    """The requests that are there at a rate: those that are served, and those that wait."""
    others = (clients - 1) / clients
    return rate * seconds + waits.queue(others * rate)[0] / others


@every_row("shares", [0.0, 0.5, 1.0])
@every_row("seed", range(50))
def test_all_clients_are_served_or_wait(shares: float, seed: int) -> None:
    draw = Random(seed)
    most = draw.uniform(1, 20)
    mates = 0.0 if shares else draw.choice([0.0, draw.uniform(0, 5)])
    work = 10 ** draw.uniform(-4, -1)
    step = 10 ** draw.uniform(-3, -1)
    waits = Waits(0.0, step / most + work, most, 0.0, mates, shares, work, step)
    clients, seconds = draw.randrange(2, 500), waits.each * 10 ** draw.uniform(0.5, 3)
    # A loop that the steps can serve: near full load, Newton's method stops early.
    clients = max(2, min(clients, int(0.8 * seconds / waits.each)))
    rate, queued = waits.rate(clients, seconds)
    assert in_system(waits, clients, seconds, rate) == pytest.approx(clients, rel=2e-3)
    assert queued == pytest.approx(clients - rate * seconds)
    assert waits.rate(clients, seconds, guess=0.7 * rate)[0] == pytest.approx(rate, rel=2e-3)


def test_a_full_loop_has_the_rate_of_the_steps() -> None:
    waits = Waits(0.0, 0.1, 1.0, 0.1, mates=2.0)
    rate, queued = waits.rate(1000, 1.0)
    assert rate == pytest.approx(10.0, rel=2e-3)
    assert in_system(waits, 1000, 1.0, rate) == pytest.approx(1000)
    assert queued == pytest.approx(990, rel=1e-3)


def in_turns(
    start: float, work: float, ending: float, lag: float, overlaps: bool, most: int = 1000
) -> tuple[float, float]:
    """The prompts of a step, and the seconds from an answer to the client's next first token, of 100,000 steps.

    A step with n prompts takes start + n x work seconds. Otherwise one of a second decodes, and answers end with it at
    random.
    """
    random, now, visible = Random(3), 0.0, 0.0
    coming: deque[float] = deque()
    steps, waits = 0, list[float]()
    for _ in range(100_000):
        began, ready = now, 0
        while ready < min(most, len(coming)) and coming[ready] + lag <= visible:
            ready += 1
        if ready:
            now, steps = now + start + ready * work, steps + 1
            waits += [now - coming.popleft() for _ in range(ready)]
        else:
            now += random.uniform(0.98, 1.02)
            passed = random.expovariate(ending)
            while passed < 1:
                coming.append(now)
                passed += random.expovariate(ending)
        visible = began if overlaps else now
    return len(waits) / steps, mean(waits)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("ending", [0.02, 0.3, 1.5])
@pytest.mark.parametrize("lag", [0.5, 2.5, 4.5])
@pytest.mark.parametrize(("start", "work", "within"), [(0.5, 10.0, 0.1), (2.0, 3.0, 0.1), (0.5, 0.7, 0.17)])
def test_prompts_in_steps_of_their_own_are_grouped_by_the_steps_with_which_answers_end(
    start: float, work: float, within: float, lag: float, ending: float, overlaps: bool
) -> None:
    prompts, first = in_turns(start, work, ending, lag, overlaps)
    found = batches(lambda prompts: start + prompts * work, 1.0, ending, lag, overlaps, 100.0)
    assert found.prompts == pytest.approx(prompts, rel=within)
    assert found.first == pytest.approx(first, rel=within)
    assert found.seconds == pytest.approx(start + found.prompts * work)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("most", [2, 3])
def test_a_group_for_which_a_step_has_no_room_takes_several(most: int, overlaps: bool) -> None:
    """A request waits for half of the others that do not fit in its step. Here, no prompt is divided."""
    prompts, first = in_turns(0.5, 3.0, 1.5, 2.5, overlaps, most)
    found = batches(lambda prompts: 0.5 + prompts * 3.0, 1.0, 1.5, 2.5, overlaps, most)
    assert found.prompts == pytest.approx(prompts, rel=0.16)
    assert found.seconds == pytest.approx(0.5 + found.prompts * 3.0)
    each = 0.5 / most + 3.0
    assert found.first + found.mates / 2 * each == pytest.approx(first, rel=0.06)
