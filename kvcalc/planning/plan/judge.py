"""Simulate layouts of a plan, and judge whether they meet its targets.

The steps of a simulation are slower by the factor of TPOT at the asked confidence (`throughput.speed.judged_factor`),
so that requests also wait longer. What is left of the factor of TTFT is one on simulated TTFTs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import ceil, sqrt
from statistics import stdev
from typing import TYPE_CHECKING, Any, TypeVar, Union

from kvcalc.notes import Note
from kvcalc.planning.plan.replicas import OnePool
from kvcalc.planning.plan.targets import METRICS, PERCENTILES, Limit, Simulated, Simulates, Targets
from kvcalc.planning.plan.traffic import seconds_text
from kvcalc.records import NamedTuple
from kvcalc.units import format_hours

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.disaggregated.split import TwoPools

Layout = Union[OnePool, "TwoPools"]
"""A layout has one pool, of replicas, or two, of prefill and of decode instances. Both have the same methods."""
L = TypeVar("L", OnePool, "TwoPools")

CLOSE = 0.9
"""A simulated time above this share of its target needs more runs."""

# At least this many requests of a run are beyond the percentile, and it has this many times the requests that run at
# once, or fewer if only means are judged. In a closed loop, it goes on until its times have settled.
_BEYOND, _TURNOVERS, _TURNOVERS_OF_MEANS = 30, 10, 4
# The winning layout is simulated with this many seeds, or with `_FEW_SEEDS` if its times are below the share `_FAR` of
# their targets, and once for this many seconds of load, because a shorter run does not show a queue that grows slowly.
_SEEDS, _FEW_SEEDS, _FAR, _LONG_SECONDS = 4, 2, 0.75, 1200
# Without a limit on the wait, servers that are less busy need no such run.
_BUSY = 0.8
# Runs differ. The mean of their times plus this many standard deviations must meet the targets, so that nearly all runs
# of that length do.
_DEVIATIONS = 2.0
_FEWEST_REQUESTS, _MOST_REQUESTS = 1_000, 50_000
# Means are known sooner than percentiles.
_MOST_OF_MEANS = 10_000
STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))


class Judged(NamedTuple):
    """A simulation and what it says about the targets.

    `missed` says which target is missed, None if all are met. `worst` is the largest of the times as a share of its
    target, and `worst_metric` says which time that is. `seed` is that of the run, and `seeds` are how many were tried.
    """

    simulated: Simulated
    step_factor: float = 1.0
    ttft_factor: float = 1.0
    missed: str | None = None
    worst: float = 0.0
    worst_metric: str | None = None
    seed: int | None = None
    seeds: int = 1

    @staticmethod
    def at(simulated: Simulated, step_factor: float, ttft_factor: float, seed: int | None = None) -> Judged:
        """A simulation whose steps took `step_factor` times their estimates. TTFT is judged at `ttft_factor`."""
        return Judged(simulated, step_factor, max(1.0, ttft_factor / step_factor), seed=seed)

    def seconds(self, metric: str, statistic: str) -> float | None:
        """A simulated time, as it is judged."""
        seconds = self.simulated.times[metric][statistic]
        return seconds * self.ttft_factor if seconds is not None and metric == "ttft" else seconds

    def against(self, targets: Targets, *, is_alone: bool) -> Judged:
        """The same, with the target that is missed most."""
        judged, simulated = self, self.simulated
        for limit in targets.limits:
            share = (self.seconds(limit.metric, limit.statistic) or 0.0) / limit.seconds
            if share > judged.worst:
                missed = _missed(limit, share, " of requests alone" if is_alone else "") if share > 1 else None
                judged = judged._replace(missed=missed, worst=share, worst_metric=limit.metric)
        deadline, times = targets.deadline_seconds, simulated.times
        if deadline is not None and not is_alone:
            stay = (times["e2e"]["mean"] or 0.0) - (times["queue"]["mean"] or 0.0)
            needed = targets.seconds_for(simulated.requests_per_second, stay)
            taken = f"{targets.num_requests:,} requests take {format_hours(needed)}"
            late = f"{taken} and the deadline is {format_hours(deadline)}"
            judged = judged._replace(worst=needed / deadline, missed=late if needed > deadline else None)
        if simulated.backlog_seconds is not None:
            # Every time in the queue is as long as the simulation, so none of them is worth telling.
            judged = judged._replace(missed="overloaded: it does not keep up with the requests")
        if simulated.refused:
            text = f"{simulated.refused:,} of {simulated.requests:,} requests are too long for the cache"
            judged = judged._replace(missed=text)
        return judged

    @property
    def is_stuck(self) -> bool:
        """Whether some requests can never run, or the queue grows."""
        return bool(self.simulated.refused) or self.simulated.backlog_seconds is not None

    def describe(self) -> dict[str, object]:
        """Its part of a row. Times are as they are judged."""
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
    def nearly(self) -> bool:
        """Whether a request alone meets its targets with steps as long as they are estimated."""
        return self.is_alone and self.judged.worst <= self.judged.step_factor

    @property
    def rank(self) -> tuple[float, float, float]:
        """What the devices count, then how close the times are to their targets, and without targets the speed."""
        layout: Layout = self.layout
        return layout.weight, self.judged.worst, -self.judged.simulated.tokens_per_second / layout.least_gain

    def describe(self) -> documents.PlanFinalist:
        """The row of this layout in the document of `kvcalc plan`. Times are as they are judged."""
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
    """Simulates the layouts of a row. Every layout is simulated at most once with the same numbers and step factor."""

    def __init__(self, targets: Targets, simulation: Simulates) -> None:
        self.targets, self.simulation = targets, simulation
        self._runs: dict[Hashable, Any] = {}
        self._found: dict[tuple[Hashable, tuple[int, ...] | None], Finalist] = {}
        self._num_requests = 0  # of all runs alike

    def at(self, layout: Layout, numbers: tuple[int, ...]) -> Finalist | None:
        """The layout with these numbers. None if the short form has an endless queue there."""
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

    def timed(self, layout: L) -> L:
        """A layout with the times and the rates of its load, simulated with steps as long as they are estimated.

        Where means were judged with such steps, it is that simulation: what is printed is what was compared.
        """
        has_means = self.targets.limits and self.targets.highest_percentile is None
        finalist = self._found.get((layout.key, layout.numbers)) if has_means else None
        if finalist is not None and finalist.judged.step_factor == 1:
            simulated = finalist.judged.simulated
        else:
            _, simulated = layout.run(self.simulation, self.targets, None, 1.0, is_alone=False)
        return layout._replace(simulated=simulated)

    def describe_limits(self, layout: Layout) -> dict[str, float | int | None]:
        """The simulated times of a layout that have a target, and the number of requests, for its row in the plan."""
        finalist = self.at(layout, layout.numbers)
        if finalist is None:
            return {}
        times = {
            f"simulated_{limit.metric}_seconds": finalist.judged.seconds(limit.metric, limit.statistic)
            for limit in self.targets.limits
        }
        return {**times, "simulated_requests": finalist.judged.simulated.requests}

    def notes(self) -> list[Note]:
        """What was simulated in another way than asked."""
        return list(
            dict.fromkeys(note for finalist in self._found.values() for note in finalist.judged.simulated.notes)
        )

    def describe(self) -> list[documents.PlanFinalist]:
        """For each layout, the fewest devices that meet the targets, and the most that do not."""
        shown: dict[tuple[Hashable, bool], Finalist] = {}
        for finalist in self._found.values():
            is_met = finalist.missed is None
            if finalist.is_alone and is_met:
                continue
            key = finalist.layout.key, is_met
            other = shown.get(key)
            if other is None or (_size(finalist) < _size(other)) == is_met:
                shown[key] = finalist
        return [finalist.describe() for finalist in shown.values()]

    def _new(self, first: Layout, layout: Layout, *, is_alone: bool) -> Finalist:
        # `first` is the first guess, so that about as many requests run at once as when the targets are met.
        self._num_requests = self._num_requests or self._count(first.in_flight(self.simulation, self.targets))
        return self._run(layout, self.simulation, self._num_requests, is_alone=is_alone)

    def _run(self, layout: Layout, simulation: Simulates, num_requests: int, *, is_alone: bool) -> Finalist:
        factors = layout.factors(self.targets)
        step, ttft = factors["tpot"][2], factors["ttft"][2]
        # One replica of a job is simulated, whatever their number.
        job = layout if self.targets.deadline_seconds is not None and isinstance(layout, OnePool) else None
        numbers = layout.numbers if job is None else (job.job_clients,)
        key = layout.key, numbers, is_alone, num_requests, step, simulation.seed
        if key not in self._runs:
            self._runs[key] = layout.run(simulation, self.targets, num_requests, step, is_alone=is_alone)
        simulated, simulation_run = self._runs[key]
        layout = simulated
        if job is not None and not is_alone:
            simulation_run = simulation_run.times_as_many(job.replicas / simulated.replicas)
            layout = job._replace(most_running=simulated.most_running)
        judged = Judged.at(simulation_run, step, ttft, simulation.seed)
        return Finalist(layout, judged.against(self.targets, is_alone=is_alone), is_alone)

    def confirm(self, finalist: Finalist) -> Finalist:
        """A layout that meets the targets, judged by several seeds: nearly all runs must meet them, and a long one.

        One run may be lucky, and too short for a queue that grows slowly, which only busy servers have. The times are
        those of the long run, of the worst one of four, or of the worst run in a closed loop, which has none. A trace
        has only one run.
        """
        if self.simulation.seed is None or finalist.judged.seeds > 1 or not self.targets.limits:
            return finalist
        number, rate = self._num_requests, self.targets.requests_per_second or 0.0
        long = number
        is_busy = self.targets.limits_waiting
        if not is_busy:
            is_busy = (finalist.layout._replace(simulated=finalist.judged.simulated).utilization or 0.0) > _BUSY
        if self.simulation.num_requests is None and is_busy:
            most = _MOST_OF_MEANS if self.targets.highest_percentile is None else _MOST_REQUESTS
            long = min(max(number, ceil(rate * _LONG_SECONDS)), max(number, most))
        runs = [finalist]
        while len(runs) < (_FEW_SEEDS if max(run.judged.worst for run in runs) < _FAR else _SEEDS):
            runs.append(self._again(finalist, len(runs), number))
        # A long run differs less from the others.
        more = _DEVIATIONS * stdev(run.judged.worst for run in runs) * sqrt(number / long)
        shown = max(runs, key=_order)
        if long > number and not shown.judged.is_stuck and _mean(runs) + more <= 1:
            shown = self._again(finalist, len(runs), long)
            longs = [shown]
            # Bursts that a short run seldom has decide how long requests wait, so long runs differ more than these, and
            # a few of them much.
            while len(longs) < _SEEDS and CLOSE < shown.judged.worst <= 1 and shown.judged.worst_metric != "tpot":
                longs.append(self._again(finalist, len(runs) + len(longs), long))
                more = max(more, _DEVIATIONS * stdev(run.judged.worst for run in longs))
                shown = max(longs, key=_order)
            runs += longs
        confirmed = self._with_others(shown, runs, more)
        self._found[finalist.layout.key, finalist.layout.numbers] = confirmed
        return confirmed

    def _again(self, finalist: Finalist, more: int, num_requests: int) -> Finalist:
        return self._run(finalist.layout, self.simulation.seeded(more), num_requests, is_alone=False)

    def _with_others(self, run: Finalist, runs: Sequence[Finalist], more: float) -> Finalist:
        """One of the runs, which also misses a target if the mean share of all and `more` is above it."""
        judged = run.judged._replace(seeds=len(runs))
        share = _mean(runs) + more
        for limit in self.targets.limits:
            if limit.metric == judged.worst_metric and share > 1 and judged.missed is None:
                judged = judged._replace(missed=_missed(limit, share, " with other seeds"))
        return run._replace(judged=judged)

    def _count(self, in_flight: float) -> int:
        """The number that was asked for, or enough for the highest percentile and for `in_flight` requests at once."""
        if self.simulation.num_requests is not None:
            return self.simulation.num_requests
        percentile = self.targets.highest_percentile
        beyond = ceil(_BEYOND / (1 - (percentile or 50) / 100))
        turnovers = _TURNOVERS_OF_MEANS if percentile is None else _TURNOVERS
        return min(max(beyond, ceil(turnovers * in_flight), _FEWEST_REQUESTS), _MOST_REQUESTS)


def _size(finalist: Finalist) -> int:
    return 0 if finalist.is_alone else finalist.layout.num_devices


def _mean(runs: Sequence[Finalist]) -> float:
    """The mean of the shares of the targets, in which all requests count alike."""
    requests = [run.judged.simulated.requests for run in runs]
    return sum(run.judged.worst * number for run, number in zip(runs, requests)) / sum(requests)


def _order(run: Finalist) -> tuple[bool, float]:
    return run.judged.is_stuck, run.judged.worst


def _missed(limit: Limit, share: float, of: str) -> str:
    name = f"{limit.metric.upper()} {limit.statistic}{of}"
    return f"{name} is {seconds_text(share * limit.seconds)} and the limit is {seconds_text(limit.seconds)}"
