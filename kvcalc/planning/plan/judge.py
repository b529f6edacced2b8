"""Simulate layouts of a plan, and judge whether they meet its targets.

Where the upper end of a range is judged (`Targets.judged_at`), the steps of a simulation are slower by that of TPOT at
this load, so that requests also wait longer. What is left of the range of TTFT is a factor on simulated TTFTs.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil
from typing import TYPE_CHECKING, Any, Union

from kvcalc.notes import Note
from kvcalc.planning.plan.targets import METRICS, PERCENTILES, Limit, Simulated, Simulates, Targets
from kvcalc.planning.plan.traffic import seconds_text
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.disaggregated.split import TwoPools
    from kvcalc.planning.plan.replicas import OnePool

Layout = Union["OnePool", "TwoPools"]
"""A layout has one pool, of replicas, or two, of prefill and of decode instances. Both have the same methods."""

# The fewest requests beyond a percentile, and the requests of a run as a multiple of those that run at once.
_BEYOND, _TURNOVERS = 30, 10
# The winning layout is simulated with this many seeds. One of these runs has this many seconds of load, because a
# shorter run does not show a queue that grows slowly.
_SEEDS, _LONG_SECONDS = 3, 1200
_FEWEST_REQUESTS, _MOST_REQUESTS = 1_000, 50_000
STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))


class Judged(NamedTuple):
    """A simulation and what it says about the targets.

    `missed` says which target is missed, None if all are met. `worst` is the largest of the times as a share of its
    target, and `worst_metric` says which time that is. `seed` is that of the run, and `seeds` are how many were tried;
    then it is the one with the longest times.
    """

    simulated: Simulated
    step_factor: float
    ttft_factor: float
    missed: str | None = None
    worst: float = 0.0
    worst_metric: str | None = None
    seed: int | None = None
    seeds: int = 1

    def seconds(self, metric: str, statistic: str) -> float | None:
        """A simulated time, at the end of its range that is judged."""
        found = self.simulated.times[metric][statistic]
        return found * self.ttft_factor if found is not None and metric == "ttft" else found

    def against(self, targets: Targets, *, is_alone: bool) -> Judged:
        """The same, with the target that is missed most."""
        judged, simulated = self, self.simulated
        for limit in targets.limits:
            share = (self.seconds(limit.metric, limit.statistic) or 0.0) / limit.seconds
            if share > judged.worst:
                missed = _missed(limit, share, is_alone) if share > 1 else None
                judged = judged._replace(missed=missed, worst=share, worst_metric=limit.metric)
        if simulated.backlog_seconds is not None:
            # Every time in the queue is as long as the simulation, so none of them is worth telling.
            judged = judged._replace(missed="overloaded: it does not keep up with the requests")
        if simulated.refused:
            text = f"{simulated.refused:,} of {simulated.requests:,} requests are too long for the cache"
            judged = judged._replace(missed=text)
        return judged

    def describe(self) -> dict[str, object]:
        """Its part of a row. Times are those at the end that is judged."""
        return {
            "passes": self.missed is None,
            "reason": self.missed,
            "keeps_up": self.simulated.backlog_seconds is None,
            "requests": self.simulated.requests,
            "seed": self.seed,
            "seeds": self.seeds,
            "max_running_requests": self.simulated.most_running,
            "step_factor": self.step_factor,
            "ttft_factor": self.ttft_factor,
            **{
                f"{metric}_{statistic}_seconds": self.seconds(metric, statistic)
                for metric in METRICS
                for statistic in STATISTICS
            },
        }


class Finalist(NamedTuple):
    """A layout that was simulated. With `is_alone`, one request after the other, on one replica or one of each pool."""

    layout: Any  # a `Layout` of the type that was asked about
    judged: Judged
    is_alone: bool

    @property
    def missed(self) -> str | None:
        """The target that is missed most. None if all are met."""
        return self.judged.missed

    @property
    def rank(self) -> tuple[float, float]:
        """What the devices count, and of layouts with as many, how close the times are to their targets."""
        return self.layout.weight, self.judged.worst

    def describe(self) -> documents.PlanFinalist:
        """The row of this layout in the document of `kvcalc plan`. Times are those at the end that is judged."""
        layout: Layout = self.layout
        row = {
            "num_devices": None if self.is_alone else layout.num_devices,
            "cost_per_hour": None if self.is_alone else layout.cost_per_hour,
            **self.judged.describe(),
        }
        return layout.describe(row, is_alone=self.is_alone)

    def __str__(self) -> str:
        return str(self.layout)


class Judge:
    """Simulates the layouts of a row. Every layout is simulated at most once with the same numbers."""

    def __init__(self, targets: Targets, simulation: Simulates) -> None:
        self.targets, self.simulation = targets, simulation
        self._found: dict[tuple[Hashable, tuple[int, ...] | None], Finalist] = {}
        self._num_requests = 0  # of all runs alike

    @property
    def decides(self) -> bool:
        """Whether the simulation chooses the layouts: for percentiles, and for every limit with a trace."""
        return self.targets.highest_percentile is not None or bool(self.simulation.trace and self.targets.limits)

    def at(self, layout: Layout, numbers: tuple[int, ...]) -> Finalist | None:
        """The layout with these numbers. None if the closed form has an endless queue there."""
        key = layout.key, numbers
        if key not in self._found:
            moved = layout.at(numbers, self.targets, is_trace=self.simulation.trace is not None)
            if moved is None:
                return None
            self._found[key] = self._new(layout, moved, is_alone=False)
        return self._found[key]

    def alone(self, layout: Layout) -> Finalist:
        """Requests one after the other. If they are too slow, no number of replicas or instances helps."""
        key = layout.key, None
        if key not in self._found:
            self._found[key] = self._new(layout, layout.alone(), is_alone=True)
        return self._found[key]

    def describe_limits(self, layout: Layout) -> dict[str, float | int | None]:
        """The simulated times of a layout that have a target, and the number of requests, for its row in the plan."""
        found = self.at(layout, layout.numbers)
        if found is None:
            return {}
        times = {
            f"simulated_{limit.metric}_seconds": found.judged.seconds(limit.metric, limit.statistic)
            for limit in self.targets.limits
        }
        return {**times, "simulated_requests": found.judged.simulated.requests}

    def notes(self) -> list[Note]:
        """What was simulated in another way than asked."""
        return list(dict.fromkeys(note for one in self._found.values() for note in one.judged.simulated.notes))

    def describe(self) -> list[documents.PlanFinalist]:
        """For each layout, the fewest devices that meet the targets, and the most that do not."""
        shown: dict[tuple[Hashable, bool], Finalist] = {}
        for one in self._found.values():
            key, is_met = (one.layout.key, one.missed is None), one.missed is None
            if one.is_alone and is_met:
                continue
            other = shown.get(key)
            if other is None or (_size(one) < _size(other)) == is_met:
                shown[key] = one
        return [one.describe() for one in shown.values()]

    def _new(self, first: Layout, layout: Layout, *, is_alone: bool) -> Finalist:
        # `first` is the first guess, so that about as many requests run at once as when the targets are met.
        self._num_requests = self._num_requests or self._count(first.in_flight)
        return self._run(layout, self.simulation, self._num_requests, is_alone=is_alone)

    def _run(self, layout: Layout, simulation: Simulates, num_requests: int, *, is_alone: bool) -> Finalist:
        ranges = layout.ranges()
        step, ttft = (self.targets.judged(*ranges[metric]) / ranges[metric][0] for metric in ("tpot", "ttft"))
        layout, found = layout.run(simulation, self.targets, num_requests, step, is_alone=is_alone)
        judged = Judged(found, step, max(1.0, ttft / step), seed=simulation.seed)
        return Finalist(layout, judged.against(self.targets, is_alone=is_alone), is_alone)

    def confirm(self, one: Finalist) -> Finalist:
        """A layout that meets the targets, with the longest times of several seeds, one of them for 20 minutes.

        One run may be lucky, and too short for a queue that grows slowly. A trace has only one run.
        """
        if self.simulation.seed is None or one.judged.seeds > 1:
            return one
        rate = self.targets.requests_per_second or 0.0
        long = min(max(self._num_requests, ceil(rate * _LONG_SECONDS)), _MOST_REQUESTS)
        worst = one
        for more in range(1, _SEEDS):
            number = self._num_requests if more > 1 or self.simulation.num_requests is not None else long
            other = self._run(one.layout, self.simulation.seeded(more), number, is_alone=False)
            worst = max(worst, other, key=lambda each: (each.missed is not None, each.judged.worst))
            if worst.missed is not None:
                break
        worst = worst._replace(judged=worst.judged._replace(seeds=_SEEDS))
        self._found[one.layout.key, one.layout.numbers] = worst
        return worst

    def _count(self, in_flight: float) -> int:
        """The number that was asked for, or enough for the highest percentile and for `in_flight` requests at once."""
        if self.simulation.num_requests is not None:
            return self.simulation.num_requests
        beyond = ceil(_BEYOND / (1 - (self.targets.highest_percentile or 50) / 100))
        return min(max(beyond, ceil(_TURNOVERS * in_flight), _FEWEST_REQUESTS), _MOST_REQUESTS)


def _size(one: Finalist) -> int:
    return 0 if one.is_alone else one.layout.num_devices


def _missed(limit: Limit, share: float, is_alone: bool) -> str:
    name = f"{limit.metric.upper()} {limit.statistic}{' of requests alone' if is_alone else ''}"
    return f"{name} is {seconds_text(share * limit.seconds)} and the limit is {seconds_text(limit.seconds)}"
