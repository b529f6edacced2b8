"""The rate of a closed loop: the one at which Little's law holds."""

from __future__ import annotations

from random import Random

import pytest

from kvcalc.throughput.scheduling import Waits
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
