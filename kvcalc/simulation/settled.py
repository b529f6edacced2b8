"""When the times of a load are known: the warm-up does not count, and a run goes on until their intervals are narrow.

The warm-up ends where the standard error of what is left is smallest (MSER-5: White, "An effective truncation heuristic
for bias reduction in simulation output", Simulation 69:6, 1997, on means of five). The interval of a mean is that of
the means of batches (Law, "Simulation Modeling and Analysis", 9.5.3). That of a percentile is between the percentiles
at the ends of the interval of the share of times below it, so that times which depend on each other widen it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, sqrt

from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.load import Statistic
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.results import of_mean_lengths, percentile, times_of

# Half of the width that the interval of a mean and of a percentile may have, as a share of it.
_MEAN, _PERCENTILE = 0.02, 0.1
_BATCHES = 20
# Student's t for 95 % and one degree of freedom less than there are batches.
_T = 2.093
_AVERAGED = 5


class Window(NamedTuple):
    """The first of the requests that count, and the widest interval of their times, relative to what is allowed."""

    first: int
    widest: float


def window_of(
    ended: Sequence[Request], statistics: Sequence[Statistic], lengths: tuple[float, float] | None = None
) -> Window:
    """What counts of requests in the order in which they ended. The widest interval is infinite if it is not known.

    The warm-up ends when both TTFT and TPOT have settled, whatever is asked: all times of these requests are printed.
    `lengths` are the means of their lengths, if these are known (`results.of_mean_lengths`).
    """
    first = 0
    for metric in dict.fromkeys(("ttft", "tpot", *(metric for metric, _ in statistics))):
        times = of_mean_lengths(metric, ended, lengths)
        first = max(first, warm_up(times) * len(ended) // max(len(times), 1))
    # If half of them do not count, the rest may be a part of the warm-up too.
    widest, counted = inf if 2 * first > len(ended) - 4 * _AVERAGED else 0.0, ended[first:]
    for metric, at in statistics:
        if at is None:
            times = of_mean_lengths(metric, counted, lengths)
            widest = max(widest, width_of_mean(times) / _MEAN if times else 0.0)
        elif times := [*times_of(metric, counted)]:
            widest = max(widest, width_of_percentile(times, at / 100) / _PERCENTILE)
    return Window(first, widest)


def warm_up(times: Sequence[float]) -> int:
    """How many of the first times do not count: at most half of them."""
    means = [sum(times[at : at + _AVERAGED]) for at in range(0, len(times) - _AVERAGED + 1, _AVERAGED)]
    total = squares = 0.0
    place, smallest = 0, inf
    for at in range(len(means) - 1, -1, -1):
        total, squares, number = total + means[at], squares + means[at] ** 2, len(means) - at
        error = max(0.0, squares - total * total / number) / number**2
        if 2 * at <= len(means) and error <= smallest:
            place, smallest = at, error
    return place * _AVERAGED


def width_of_mean(times: Sequence[float]) -> float:
    """Half of the width of the interval of the mean, as a share of it."""
    mean, width = _interval(times)
    return width / mean if mean else 0.0


def width_of_percentile(times: Sequence[float], share: float) -> float:
    """The same of the time that `share` of the times do not exceed."""
    ascending = sorted(times)
    middle = percentile(ascending, share)
    _, width = _interval([float(time <= middle) for time in times])
    if share + width > 1:
        return inf
    low, high = (percentile(ascending, end) for end in (max(0.0, share - width), share + width))
    return (high - low) / 2 / middle if middle else 0.0


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of the width of its interval."""
    mean, means = sum(values) / len(values), [*_means_of_batches(values)]
    if len(means) < _BATCHES:
        return mean, inf
    middle = sum(means) / _BATCHES
    deviation = sqrt(sum((each - middle) ** 2 for each in means) / (_BATCHES - 1))
    return mean, _T * deviation / sqrt(_BATCHES)


def _means_of_batches(values: Sequence[float]) -> Iterator[float]:
    size, first = divmod(len(values), _BATCHES)
    for at in range(first, len(values) if size else 0, max(size, 1)):
        yield sum(values[at : at + size]) / size
