"""Simulate layouts of a plan, and judge whether they meet its targets.

With a confidence of 80, the steps of a simulation are slower by the upper end of TPOT's range at this load, so that
requests also wait longer. The range of TTFT is wider than that of the steps: the rest is a factor on simulated TTFTs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Protocol

from kvcalc.notes import Note
from kvcalc.planning.replicas import Option, with_replicas
from kvcalc.planning.shapes import Shape
from kvcalc.planning.targets import METRICS, PERCENTILES, RANGE_CONFIDENCE, Limit, Targets
from kvcalc.planning.traffic import Kind, Traffic, replica_of, seconds_text
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple

# At least so many requests are beyond a percentile, and a run has so many times the requests that run at once.
_BEYOND, _TURNOVERS = 30, 10
_FEWEST_REQUESTS, _MOST_REQUESTS = 1_000, 50_000
STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))


class Simulated(NamedTuple):
    """What one simulation found: for `ttft`, `tpot` and `e2e` the seconds of `mean`, `p50`, `p90`, `p95` and `p99`.

    `most_running` is the limit of running requests of an attention replica. `refused` of the `requests` can never run.
    `backlog_seconds` is the longest wait in the queue if the queue grows without end, None if the replicas keep up.
    `notes` are about what was simulated in another way than asked.
    """

    times: Mapping[str, Mapping[str, float | None]]
    requests: int
    refused: int
    most_running: int
    backlog_seconds: float | None = None
    notes: tuple[Note, ...] = ()


class Pools(NamedTuple):
    """The questions about one prefill and one decode instance, and their numbers. None: requests one after the other.

    `transfer` are the bytes per second of the link between them.
    """

    prefill: Question
    decode: Question
    numbers: tuple[int, int] | None
    transfer: int


class Simulates(Protocol):
    """Simulates the requests of a plan. `planning` does not import `simulation`, which has one of these."""

    @property
    def seed(self) -> int | None:
        """The seed of the arrivals and the lengths. None if a trace has both."""

    @property
    def num_requests(self) -> int | None:
        """The number of requests that was asked for, or that a trace has. None for a default."""

    @property
    def trace(self) -> Mapping[str, Any] | None:
        """The `trace` part of the plan's document, with the rates of a trace that has the arrivals. None without."""

    @property
    def notes(self) -> Sequence[Note]:
        """Notes about rows of a trace that are left out."""

    def run(
        self, question: Question, targets: Targets, replicas: int | None, num_requests: int, step_factor: float
    ) -> Simulated:
        """The times of `num_requests` requests on `replicas` replicas, or of one after the other if None.

        The times of all steps are multiplied by `step_factor`. UsageError (exit 2) for what is not simulated.
        """

    def run_pools(self, pools: Pools, targets: Targets, num_requests: int, step_factor: float) -> Simulated:
        """The same on separate prefill and decode instances."""


class Judged(NamedTuple):
    """A simulation and what it says about the targets.

    `missed` says which target is missed, None if all are met. `worst` is the largest of the times as a share of its
    target, and `worst_metric` says which time that is.
    """

    simulated: Simulated
    step_factor: float
    ttft_factor: float
    missed: str | None = None
    worst: float = 0.0
    worst_metric: str | None = None

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
        if judged.missed is None and simulated.backlog_seconds is not None:
            wait = seconds_text(simulated.backlog_seconds)
            judged = judged._replace(missed=f"does not keep up with the requests: they wait up to {wait}")
        if simulated.refused:
            text = f"{simulated.refused:,} of {simulated.requests:,} requests are too long for the cache"
            judged = judged._replace(missed=text)
        return judged

    def describe(self, seed: int | None) -> dict[str, Any]:
        """Its part of a row. Times are those at the end that is judged."""
        return {
            "passes": self.missed is None,
            "reason": self.missed,
            "requests": self.simulated.requests,
            "seed": seed,
            "max_running_requests": self.simulated.most_running,
            "step_factor": self.step_factor,
            "ttft_factor": self.ttft_factor,
            **{
                f"{metric}_{statistic}_seconds": self.seconds(metric, statistic)
                for metric in METRICS
                for statistic in STATISTICS
            },
        }

    def describe_limits(self, targets: Targets) -> dict[str, Any]:
        """The times that have a target, and the number of simulated requests, for a row of the plan."""
        times = {
            f"simulated_{limit.metric}_seconds": self.seconds(limit.metric, limit.statistic) for limit in targets.limits
        }
        return {**times, "simulated_requests": self.simulated.requests}


class Finalist(NamedTuple):
    """A layout that was simulated. `replicas` is None for requests one after the other, on one replica."""

    option: Option
    replicas: int | None
    judged: Judged

    @property
    def missed(self) -> str | None:
        return self.judged.missed

    @property
    def worst(self) -> float:
        return self.judged.worst

    def describe(self, kind: Kind, seed: int | None) -> dict[str, Any]:
        """The row of this layout in the document of `kvcalc plan`. Times are those at the end that is judged."""
        shape, replicas = self.option.shape, self.replicas
        has_cost = replicas is not None and kind.price is not None
        return {
            "gpu": kind.gpu.name,
            "engine": kind.engine,
            **shape.describe(self.option.probe.expert_parallel_size),
            "replicas": replicas,
            "num_devices": None if replicas is None else self.num_devices,
            "cost_per_hour": (kind.price or 0.0) * self.num_devices if has_cost else None,
            **self.judged.describe(seed),
            "disaggregated": None,
        }

    @property
    def num_devices(self) -> int:
        return (self.replicas or 1) * self.option.shape.devices

    def __str__(self) -> str:
        return str(self.option._replace(replicas=self.replicas or 1))


class Judge:
    """Simulates layouts of one kind of device. Every layout and number of replicas is simulated at most once."""

    def __init__(self, traffic: Traffic, kind: Kind, simulation: Simulates) -> None:
        self.kind, self.targets, self.simulation = kind, traffic.targets, simulation
        self.free = traffic._replace(targets=traffic.targets.without_limits())
        self._found: dict[tuple[Shape, int | None], Finalist] = {}
        self._num_requests = 0  # of all runs alike

    def at(self, option: Option, replicas: int | None) -> Finalist:
        """The layout of `option` with a number of replicas. None: each request alone."""
        key = (option.shape, replicas)
        self._num_requests = self._num_requests or self._count(option)
        if key not in self._found:
            self._found[key] = self._new(self._with(option, replicas or 1), replicas)
        return self._found[key]

    def fewest(self, option: Option, most: int) -> Finalist:
        """The layout with the fewest replicas that meet the targets, or with `most` if these do not either."""
        high, low, step = min(option.replicas, most), 0, 1
        while self.at(option, high).missed is not None:
            if high == most:
                return self.at(option, high)
            low, high, step = high, min(high + step, most), 2 * step
        step = 1
        while high - low > 1:
            middle = (low + high) // 2 if low else max(high - step, 1)
            if self.at(option, middle).missed is None:
                high, step = middle, 2 * step
            else:
                low = middle
        return self.at(option, high)

    def notes(self) -> list[Note]:
        """What was simulated in another way than asked."""
        return list(dict.fromkeys(note for one in self._found.values() for note in one.judged.simulated.notes))

    def finalists(self) -> list[Finalist]:
        """For each layout, the fewest replicas that meet the targets, and the most that do not."""
        shown: dict[tuple[Shape, bool], Finalist] = {}
        for (shape, replicas), one in self._found.items():
            key, is_met = (shape, one.missed is None), one.missed is None
            if replicas is None and is_met:
                continue
            other = shown.get(key)
            if other is None or ((replicas or 0) < (other.replicas or 0)) == is_met:
                shown[key] = one
        return list(shown.values())

    def _with(self, option: Option, replicas: int) -> Option:
        """The layout with the closed form's figures for another number of replicas."""
        if option.replicas == replicas:
            return option
        return option._replace(replicas=replicas, probe=with_replicas(self.free, self.kind, option.shape, replicas))

    def _new(self, option: Option, replicas: int | None) -> Finalist:
        shape = option.shape
        serving = option.probe.serving
        step, ttft = factors_of((_highest(serving, "tpot"), _highest(serving, "ttft")), self.targets.confidence)
        question = replica_of(self.free.of(shape), self.kind, shape.tensor, shape.stages, replicas or 1)
        found = self.simulation.run(question, self.targets, replicas, self._num_requests, step)
        option = option._replace(most_running=found.most_running)
        return Finalist(option, replicas, Judged(found, step, ttft).against(self.targets, is_alone=replicas is None))

    def _count(self, option: Option) -> int:
        """Enough requests for the highest percentile, and for a run that is much longer than a request.

        `option` is the first guess, so that about as many requests run at once as when the targets are met.
        """
        return count_requests(self.simulation, self.targets, option.replicas * option.probe.running)


def simulation_decides(targets: Targets, simulation: Simulates) -> bool:
    """Whether the simulation chooses the layouts: for percentiles, and for every limit with a trace."""
    return targets.highest_percentile is not None or bool(simulation.trace and targets.limits)


def count_requests(simulation: Simulates, targets: Targets, in_flight: float) -> int:
    """The number that was asked for, or enough for the highest percentile if `in_flight` requests run at once."""
    if simulation.num_requests is not None:
        return simulation.num_requests
    beyond = ceil(_BEYOND / (1 - (targets.highest_percentile or 50) / 100))
    return min(max(beyond, ceil(_TURNOVERS * in_flight), _FEWEST_REQUESTS), _MOST_REQUESTS)


def factors_of(highest: tuple[float, float], confidence: int) -> tuple[float, float]:
    """The factor on the seconds of a step, and the factor that is left for TTFT. Both are 1 for the point estimate.

    `highest` are the factors on TPOT and TTFT for the upper ends of their ranges.
    """
    step, ttft = highest if confidence == RANGE_CONFIDENCE else (1.0, 1.0)
    return step, max(1.0, ttft / step)


def _highest(serving: Mapping[str, Any], name: str) -> float:
    """The factor on a time for the upper end of its range. 1 without a range."""
    high = serving.get(f"{name}_high_seconds")
    return 1.0 if high is None else float(high / serving[f"{name}_seconds"])


def _missed(limit: Limit, share: float, is_alone: bool) -> str:
    name = f"{limit.metric.upper()} {limit.statistic}{' of requests alone' if is_alone else ''}"
    return f"{name} is {seconds_text(share * limit.seconds)} and the limit is {seconds_text(limit.seconds)}"
