"""The figures of a simulation: percentiles, rates, goodput, and the state over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import mul
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
# With fewer requests, what their lengths explain is not known. Two lengths that vary together explain the same.
_FEWEST, _DISTINCT = 100, 1e-6


class Outcome(NamedTuple):
    """The requests that have ended, in the order of time. Times count from the `first` to before the `last` one.

    `is_steady` is whether all clients are there in that time. `refused` requests can never run. `lengths` are the mean
    tokens of a prompt and of an answer if they are known and times are those of requests of these lengths on average.
    """

    requests: Sequence[Request]
    first: int
    last: int
    ranks: Sequence[Replica]
    is_steady: bool
    refused: int = 0
    lengths: tuple[float, float] | None = None

    @property
    def counted(self) -> Sequence[Request]:
        """The requests whose times count."""
        return self.requests[self.first : self.last]


class Limits(NamedTuple):
    """The longest allowed times of a request that counts as good. None is no limit."""

    max_ttft_seconds: float | None = None
    max_tpot_seconds: float | None = None


def describe_times(outcome: Outcome) -> list[documents.SimulateTime]:
    """One row per time: to the first token, per output token of a request, between tokens, whole, and in the queue.

    Times between tokens are those of all requests.
    """
    gaps, requests = TokenGaps(), outcome.requests
    for rank in outcome.ranks:
        gaps.merge(rank.gaps)
    spent = sum((request.finish or 0.0) - (request.first_token or 0.0) for request in requests)
    return [
        *(_row(metric, outcome) for metric in ("ttft", "tpot")),
        _time("itl", spent / gaps.tokens if gaps.tokens else None, gaps.percentile, gaps.longest or None),
        *(_row(metric, outcome) for metric in ("e2e", "queue")),
    ]


def ttft_of(request: Request) -> float:
    """The seconds until the client has the first token."""
    return _since(request, request.first_token) + request.lag


def e2e_of(request: Request) -> float:
    """The seconds until the client has the whole answer."""
    return _since(request, request.finish) + request.lag


def tpot_of(request: Request) -> float | None:
    """The mean time per output token after the first one. None if the answer has one token."""
    if request.answer_tokens == 1 or request.finish is None or request.first_token is None:
        return None
    return (request.finish - request.first_token) / (request.answer_tokens - 1)


def queue_of(request: Request) -> float:
    """The seconds until the request first runs."""
    return _since(request, request.started)


_TIMES: dict[str, Callable[[Request], float | None]] = {
    "ttft": ttft_of, "tpot": tpot_of, "e2e": e2e_of, "queue": queue_of,
}  # fmt: skip


def times_of(metric: str, requests: Iterable[Request]) -> Iterator[float]:
    """The times of requests: `ttft`, `tpot`, `e2e` or `queue`. Answers of one token have no time per output token."""
    return (time for time in map(_TIMES[metric], requests) if time is not None)


def is_good(request: Request, limits: Limits) -> bool:
    """Whether a request meets all limits."""
    tpot = tpot_of(request) or 0.0
    return (limits.max_ttft_seconds is None or ttft_of(request) <= limits.max_ttft_seconds) and (
        limits.max_tpot_seconds is None or tpot <= limits.max_tpot_seconds
    )


def mean_of(metric: str, outcome: Outcome) -> float:
    """The mean time. 0 if no request has one."""
    times = of_mean_lengths(metric, outcome.counted, outcome.lengths)
    return max(0.0, sum(times) / len(times)) if times else 0.0


def of_mean_lengths(
    metric: str, requests: Sequence[Request], lengths: tuple[float, float] | None
) -> list[float]:  # fmt: skip
    """The times of requests, without what the deviation of their own lengths from the mean `lengths` explains.

    Their mean is that of the times, but it is known sooner: the means of the lengths are known, and not only those of
    the requests that happened to come (control variates: Lavenberg and Welch, "A perspective on the use of control
    variables", Management Science 27:3, 1981). Without `lengths`, they are the times themselves.
    """
    pairs = [(time, request) for request in requests if (time := _TIMES[metric](request)) is not None]
    times = [time for time, _ in pairs]
    if lengths is None or len(times) < _FEWEST:
        return times
    x, y = [request.prompt_tokens - lengths[0] for _, request in pairs], [
        request.answer_tokens - lengths[1] for _, request in pairs
    ]  # fmt: skip
    xx, yy, xy = _covariance(x, x), _covariance(y, y), _covariance(x, y)
    xt, yt, of_both = _covariance(x, times), _covariance(y, times), xx * yy - xy * xy
    if of_both > _DISTINCT * xx * yy:
        slopes = (xt * yy - yt * xy) / of_both, (yt * xx - xt * xy) / of_both
    else:
        slopes = xt / xx if xx else 0.0, 0.0 if xx or not yy else yt / yy
    return [time - slopes[0] * a - slopes[1] * b for time, a, b in zip(times, x, y)]


def _covariance(first: Sequence[float], second: Sequence[float]) -> float:
    """The summed products of deviations from the means."""
    products: float = sum(map(mul, first, second))
    return products - sum(first) * sum(second) / len(first)


class Rates(NamedTuple):
    """Requests and output tokens per second."""

    requests: float
    tokens: float


def rates_of(outcome: Outcome, load: Load) -> Rates:
    """What the servers achieve.

    In a steady closed loop, it follows from the times by Little's law, which is more exact than a count. At a rate with
    which they keep up until the times are known, it is that rate. Otherwise it is that of the whole run.
    """
    requests, counted, clients = outcome.requests, outcome.counted, load.clients
    rate: float | None = None
    if outcome.is_steady and clients is not None:
        rate = clients / (mean_of("e2e", outcome) + load.think_seconds)
    elif load.number is None and load.requests_per_second is not None and keeps_up(requests):
        rate = load.requests_per_second * len(requests) / (len(requests) + outcome.refused)
    if rate is not None:
        tokens = outcome.lengths and outcome.lengths[1]
        return Rates(rate, rate * (tokens or sum(request.answer_tokens for request in counted) / len(counted)))
    seconds = _end(requests) - _begin(requests)
    return Rates(len(requests) / seconds, sum(request.answer_tokens for request in requests) / seconds)


def _begin(requests: Sequence[Request]) -> float:
    return min(request.arrival for request in requests)


def _end(requests: Sequence[Request]) -> float:
    return max(request.arrival + e2e_of(request) for request in requests)


def describe_results(outcome: Outcome, limits: Limits, load: Load) -> documents.SimulateResults:
    """The `results` part of the document."""
    requests, counted, ranks = outcome.requests, outcome.counted, outcome.ranks
    seconds, rates = _end(requests) - _begin(requests), rates_of(outcome, load)
    good = sum(is_good(request, limits) for request in counted) if any(limit is not None for limit in limits) else None
    pools = [rank.pool for rank in ranks]
    return {
        "duration_seconds": seconds,
        "requests": len(requests),
        "counted_requests": len(counted),
        "requests_per_second": rates.requests,
        "tokens_per_second": rates.tokens,
        "keeps_up": load.clients is not None or keeps_up(requests),
        "good_requests": good,
        "goodput_requests_per_second": None if good is None else good / len(counted) * rates.requests,
        "mean_running_requests": sum(rank.timeline.running_seconds for rank in ranks) / seconds,
        "mean_waiting_requests": sum(map(queue_of, counted)) / len(counted) * rates.requests,
        "busy_share": sum(rank.timeline.busy_seconds for rank in ranks) / (seconds * len(ranks)),
        "preemptions": sum(rank.preemptions for rank in ranks),
        "preempted_requests": sum(request.preemptions > 0 for request in requests),
        "cached_tokens": sum(request.found_tokens for request in requests),
        "most_used_blocks": max(pool.most_used for pool in pools) if pools[0].capacity is not None else None,
    }


# Servers do not keep up if requests wait in the queue for this share of the run on average. In a queue that grows
# without end, the mean wait is half of the time that the servers take longer than the arrivals. In one that does not,
# it is that of a few requests, and a run has at least a thousand.
_BACKLOG = 0.01


def keeps_up(requests: Sequence[Request]) -> bool:
    """Whether the queue of requests that arrive whatever happens does not grow without end."""
    waits = sum(map(queue_of, requests)) / len(requests)
    return waits <= _BACKLOG * (_end(requests) - _begin(requests))


def describe_timeline(replicas: Sequence[Replica]) -> list[documents.SimulateState]:
    """The state of all replicas together at equal distances."""
    end = max(replica.now for replica in replicas)
    times = [[sample.seconds for sample in replica.timeline.samples] for replica in replicas]
    states: list[documents.SimulateState] = []
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
        states.append(
            {"seconds": seconds, "waiting_requests": waiting, "running_requests": running, "used_blocks": blocks}
        )
    return states


def _row(metric: str, outcome: Outcome) -> documents.SimulateTime:
    values = sorted(times_of(metric, outcome.counted))
    if not values:
        return _time(metric, None, lambda share: None, None)
    return _time(metric, mean_of(metric, outcome), lambda share: percentile(values, share), values[-1])


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
