"""The figures of a simulation: percentiles, rates, goodput, and the state over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.replica import Replica
from kvcalc.simulation.replicas.timeline import TokenGaps

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The rows of the timeline.
_ROWS = 60


# Replicas do not keep up if requests wait in the queue for this share of the run on average. In a queue that grows
# without end, the mean wait is half of the time that the replicas take longer than the arrivals. In one that does not,
# it is that of a few requests, and a run has at least a thousand.
_BACKLOG = 0.01


class Limits(NamedTuple):
    """The longest allowed times of a request that counts as good. None is no limit."""

    max_ttft_seconds: float | None = None
    max_tpot_seconds: float | None = None


def counted(requests: Sequence[Request], load: Load) -> Sequence[Request]:
    """The requests whose times count: all, or without the first one of each client, which are sent together at 0.

    If no client sends a second one, all count.
    """
    later = [request for request in requests if request.arrival > 0] if load.leaves_out_first else []
    return later or requests


def describe_times(
    requests: Sequence[Request], replicas: Sequence[Replica], load: Load
) -> list[documents.SimulateTime]:
    """One row per time: to the first token, per output token of a request, between tokens, whole, and in the queue.

    Times between tokens are those of all requests.
    """
    gaps, judged = TokenGaps(), counted(requests, load)
    for replica in replicas:
        gaps.merge(replica.gaps)
    tpots = [time for request in judged if (time := tpot_of(request)) is not None]
    spent = sum((request.finish or 0.0) - (request.first_token or 0.0) for request in requests)
    return [
        _row("ttft", [ttft_of(request) for request in judged]),
        _row("tpot", tpots),
        _time("itl", spent / gaps.tokens if gaps.tokens else None, gaps.percentile, gaps.longest or None),
        _row("e2e", [e2e_of(request) for request in judged]),
        _row("queue", [_since(request, request.started) for request in judged]),
    ]


def ttft_of(request: Request) -> float:
    """The seconds until the client has the first token."""
    return _since(request, request.first_token) + request.lag


def mean_ttft(requests: Sequence[Request]) -> float:
    """The mean seconds until the clients have the first tokens."""
    return sum(map(ttft_of, requests)) / len(requests)


def e2e_of(request: Request) -> float:
    """The seconds until the client has the whole answer."""
    return _since(request, request.finish) + request.lag


def tpot_of(request: Request) -> float | None:
    """The mean time per output token after the first one. None if the answer has one token."""
    if request.answer_tokens == 1 or request.finish is None or request.first_token is None:
        return None
    return (request.finish - request.first_token) / (request.answer_tokens - 1)


def is_good(request: Request, limits: Limits) -> bool:
    """Whether a request meets all limits."""
    tpot = tpot_of(request) or 0.0
    return (limits.max_ttft_seconds is None or ttft_of(request) <= limits.max_ttft_seconds) and (
        limits.max_tpot_seconds is None or tpot <= limits.max_tpot_seconds
    )


def describe_results(
    requests: Sequence[Request], replicas: Sequence[Replica], limits: Limits, load: Load
) -> documents.SimulateResults:
    """The `results` part of the document. In a closed loop, clients send their first requests together, at 0."""
    is_closed_loop, judged = load.concurrency is not None, counted(requests, load)
    first = min(request.arrival for request in requests)
    seconds = max(request.arrival + e2e_of(request) for request in requests) - first
    good = sum(is_good(request, limits) for request in judged) if any(limit is not None for limit in limits) else None
    pools = [replica.pool for replica in replicas]
    mean_wait = sum(_since(request, request.started) for request in requests) / len(requests)
    later = [ttft_of(request) for request in requests if request.arrival > 0] if is_closed_loop else []
    return {
        "duration_seconds": seconds,
        "requests": len(requests),
        "counted_requests": len(judged),
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": sum(request.answer_tokens for request in requests) / seconds,
        "keeps_up": is_closed_loop or mean_wait <= _BACKLOG * seconds,
        "good_requests": good,
        "goodput_requests_per_second": None if good is None else good / len(judged) * len(requests) / seconds,
        "steady_ttft_seconds": sum(later) / len(later) if later else None,
        "mean_running_requests": sum(replica.timeline.running_seconds for replica in replicas) / seconds,
        "mean_waiting_requests": mean_wait * len(requests) / seconds,
        "busy_share": sum(replica.timeline.busy_seconds for replica in replicas) / (seconds * len(replicas)),
        "preemptions": sum(replica.preemptions for replica in replicas),
        "preempted_requests": sum(request.preemptions > 0 for request in requests),
        "cached_tokens": sum(request.found_tokens for request in requests),
        "most_used_blocks": max(pool.most_used for pool in pools) if pools[0].capacity is not None else None,
    }


def describe_timeline(replicas: Sequence[Replica]) -> list[documents.SimulateState]:
    """The state of all replicas together at equal distances."""
    end = max(replica.now for replica in replicas)
    times = [[sample.seconds for sample in replica.timeline.samples] for replica in replicas]
    found: list[documents.SimulateState] = []
    for row in range(1, _ROWS + 1):
        seconds = end * row / _ROWS
        waiting = running = used = 0
        for replica, seen in zip(replicas, times):
            place = bisect_right(seen, seconds) - 1
            if place >= 0:
                sample = replica.timeline.samples[place]
                waiting, running = waiting + sample.waiting, running + sample.running
                used += sample.used_blocks
        blocks = used if replicas[0].pool.capacity is not None else None
        found.append(
            {"seconds": seconds, "waiting_requests": waiting, "running_requests": running, "used_blocks": blocks}
        )
    return found


def _row(metric: str, values: list[float]) -> documents.SimulateTime:
    values = sorted(values)
    if not values:
        return _time(metric, None, lambda share: None, None)
    return _time(metric, sum(values) / len(values), lambda share: percentile(values, share), values[-1])


def _time(
    metric: str, mean: float | None, at: Callable[[float], float | None], longest: float | None
) -> documents.SimulateTime:
    if mean is not None and longest is not None:
        mean = min(mean, longest)  # the sum of equal times may be rounded up
    return {
        "metric": cast(Any, metric), "mean_seconds": mean, "p50_seconds": at(0.5), "p90_seconds": at(0.9),
        "p95_seconds": at(0.95), "p99_seconds": at(0.99), "max_seconds": longest,
    }  # fmt: skip


def percentile(ascending: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, between the two nearest ones as in numpy.percentile."""
    place = share * (len(ascending) - 1)
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def _since(request: Request, seconds: float | None) -> float:
    return (seconds or 0.0) - request.arrival
