"""The load that a server sustains: the largest rate at which requests meet their targets, by simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvcalc.planning.answers.estimate import answer
from kvcalc.planning.plan.judge import STATISTICS, Judged
from kvcalc.planning.plan.targets import METRICS, Simulates, Targets
from kvcalc.question.question import Question

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The precision of the rate, and the requests of a run. As in a plan, the last run has this many seconds of load.
_CLOSE = 0.02
_REQUESTS, _LONG_SECONDS, _MOST_REQUESTS = 1_000, 1_200, 20_000
# A rate that fails in the long run is lowered by this share, at most this many times.
_LOWER, _TRIES = 0.05, 12


def capacity_of(
    question: Question, input_tokens: int, output_tokens: int, targets: Targets, simulation: Simulates
) -> documents.CheckCapacity | None:
    """The `capacity` part of the document: the largest rate, and the times there. None if the speed is not known.

    A rate is kept if the targets are met and the queue does not grow without bound.
    """
    speed = question.speed_asked._replace(input_tokens=input_tokens, output_tokens=output_tokens, concurrency=None)
    held = question._replace(speed=speed, context_tokens=None, fits_context=False, batch_size=1)
    throughput = answer(held).document["throughput"]
    serving = None if throughput is None else throughput["serving"]
    if serving is None:
        return None
    most = serving["requests_per_second"] * 1.25
    served = question._replace(speed=question.speed_asked._replace(input_tokens=None, output_tokens=None))

    def judged(rate: float, requests: int, more: int = 0) -> Judged:
        asked = targets._replace(requests_per_second=rate)
        found = simulation.seeded(more).run(served, asked, 1, requests, 1.0)
        return Judged(found, 1.0, 1.0).against(asked, is_alone=False)

    alone = Judged(simulation.run(served, targets, None, 1, 1.0), 1.0, 1.0).against(targets, is_alone=True)
    if alone.missed is not None:
        return _described(0.0, alone, targets)
    low, high, limit = 0.0, most, None
    while high - low > _CLOSE * high:
        rate = (low + high) / 2
        tried = judged(rate, _REQUESTS)
        if tried.missed is None:
            low = rate
        else:
            high, limit = rate, tried.missed
        if high < most * 1e-4:
            return _described(0.0, tried, targets)
    for _ in range(_TRIES):
        tried = judged(low, int(min(max(low * _LONG_SECONDS, _REQUESTS), _MOST_REQUESTS)), 1)
        if tried.missed is None:
            break
        low, limit = low * (1 - _LOWER), tried.missed
    else:
        return _described(0.0, tried, targets)
    return {**_described(low, tried, targets), "limited_by": limit}


def _described(rate: float, judged: Judged, targets: Targets) -> documents.CheckCapacity:
    times = {
        f"{metric}_{statistic}_seconds": judged.seconds(metric, statistic)
        for metric in METRICS
        for statistic in STATISTICS
    }
    described = {
        "requests_per_second": rate,
        "limited_by": judged.missed,
        "simulated_requests": judged.simulated.requests,
        "max_running_requests": judged.simulated.most_running,
    }
    return cast("documents.CheckCapacity", {**described, **times})
