"""The times over the load that a report draws."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvcalc import load_model
from kvcalc.planning.plan.load_curve import curve_of_server, curve_of_simulation
from kvcalc.planning.plan.planned import PlannedLoad
from kvcalc.planning.plan.targets import Simulated, Targets
from kvcalc.question.question import Question

TIMES = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 2.0}


class Recorded:
    """A load that is not simulated: it remembers what it was asked, and is overloaded beyond `most`."""

    def __init__(self, most: float) -> None:
        self.most, self.asked = most, list[Targets]()

    def _replace(self, **changes: object) -> Recorded:
        assert changes == {"recording": None, "num_requests": None}
        return self

    def run(self, question: object, targets: Targets, replicas: int, requests: int, factor: float) -> Simulated:
        self.asked.append(targets)
        backlog = 9.0 if (targets.concurrency or targets.requests_per_second or 0) > self.most else None
        return Simulated(dict.fromkeys(("ttft", "tpot", "e2e"), TIMES), requests, 0, 8, backlog_seconds=backlog)


def curve(load: Recorded, targets: Targets, replicas: int = 1) -> list[Any]:
    question = Question(load_model("llama-3-8b"))
    return list(curve_of_server(cast(PlannedLoad, load), question, targets, replicas))


def test_the_clients_of_a_closed_loop_are_shares_of_those_asked_for() -> None:
    load = Recorded(1e9)
    rows = curve(load, Targets(40, None))
    assert [row["load"] for row in rows] == [8, 16, 24, 32, 40, 48, 60]
    assert [targets.concurrency for targets in load.asked] == [8, 16, 24, 32, 40, 48, 60]
    assert {row["ttft_p99_seconds"] for row in rows} == {2.0}
    # Each replica has a client, and no number of clients is drawn twice.
    assert [row["load"] for row in curve(Recorded(1e9), Targets(4, None), 3)] == [3, 4, 5, 6]


def test_a_rate_grows_until_the_server_is_overloaded() -> None:
    rows = curve(Recorded(12.0), Targets(None, 10.0))
    assert [row["load"] for row in rows] == pytest.approx([0.5, 1, 2, 4, 6, 8, 10, 12, 15])
    assert [row["ttft_mean_seconds"] for row in rows] == [1.0] * 8 + [None]


@pytest.mark.parametrize(
    ("is_open", "shares"),
    [
        (True, [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2, 2.5, 3, 4]),
        (False, [0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5]),
    ],
)
def test_a_simulation_is_asked_for_the_shares_of_its_kind_of_load(
    is_open: bool, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def ask(share: float) -> Any:
        asked.append(share)
        return {"load": {"concurrency": None, "requests_per_second": 10 * share}}

    served = Simulated(dict.fromkeys(("ttft", "tpot", "e2e"), TIMES), 100, 0, 8)
    monkeypatch.setattr("kvcalc.planning.plan.load_curve.simulated_of", lambda *_, **__: served)
    rows: list[Any] = list(curve_of_simulation(ask, is_open=is_open))
    assert asked == pytest.approx(shares)
    assert [row["load"] for row in rows] == pytest.approx([10 * share for share in shares])
