"""Percentiles of a plan: layouts that hold the requests are simulated, and the smallest that meets its targets wins.

The closed form says which layouts hold the requests, and in which order to try them. Requests one after the other are
simulated first: if these are too slow, no number of replicas helps. More replicas are not slower, so doubled steps and
bisection find the fewest. A layout that can only lose to the best so far is simulated once, on as many devices.

With a confidence of 80, the steps of a simulation are slower by the upper end of TPOT's range at this load, so that
requests also wait longer. The range of TTFT is wider than that of the steps: the rest is a factor on simulated TTFTs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple, Protocol

from kvcalc.errors import UsageError
from kvcalc.planning.question import Question
from kvcalc.planning.replicas import Option, find_options, more_devices, smallest, why_not, with_replicas
from kvcalc.planning.shapes import Shape
from kvcalc.planning.targets import METRICS, PERCENTILES, RANGE_CONFIDENCE, Limit, Targets
from kvcalc.planning.traffic import Kind, Traffic, Trouble, replica_of, seconds_text

# The layouts of one kind of device that are simulated: at least as many as the default search tries at once.
DEFAULT_FINALISTS = 8
# At least so many requests are beyond a percentile, and a run has so many times the requests that run at once.
_BEYOND, _TURNOVERS = 30, 10
_FEWEST_REQUESTS, _MOST_REQUESTS = 1_000, 50_000
STATISTICS = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))


class Simulated(NamedTuple):
    """What one simulation found: for `ttft`, `tpot` and `e2e` the seconds of `mean`, `p50`, `p90`, `p95` and `p99`.

    `most_running` is the engine's limit of running requests per replica. `refused` of the `requests` can never run.
    """

    times: Mapping[str, Mapping[str, float | None]]
    requests: int
    refused: int
    most_running: int


class Simulates(Protocol):
    """Simulates the requests of a plan. `planning` does not import `simulation`, which has one of these."""

    @property
    def seed(self) -> int | None:
        """The seed of the arrivals and the lengths. None if a trace has both."""

    @property
    def num_requests(self) -> int | None:
        """The number of requests that was asked for, or None."""

    def run(
        self, question: Question, targets: Targets, replicas: int | None, num_requests: int, step_factor: float
    ) -> Simulated:
        """The times of `num_requests` requests on `replicas` replicas, or of one after the other if None.

        The times of all steps are multiplied by `step_factor`. UsageError (exit 2) for what is not simulated.
        """


class Finalist(NamedTuple):
    """A layout that was simulated. `replicas` is None for requests one after the other, on one replica.

    `missed` says which target is missed, None if all are met. `worst` is the largest of the times as a share of its
    target.
    """

    option: Option
    replicas: int | None
    simulated: Simulated
    step_factor: float
    ttft_factor: float
    missed: str | None
    worst: float

    def describe(self, kind: Kind, seed: int | None) -> dict[str, Any]:
        """The row of this layout in the document of `kvcalc plan`. Times are those at the end that is judged."""
        shape, replicas = self.option.shape, self.replicas
        has_cost = replicas is not None and kind.price is not None
        return {
            "gpu": kind.gpu.name,
            "engine": kind.engine,
            "tensor_parallel_size": shape.tensor,
            "pipeline_parallel_size": shape.stages,
            "data_parallel_size": shape.attention_replicas,
            "expert_parallel_size": self.option.probe.expert_parallel_size,
            "decode_context_parallel_size": shape.token_ranks,
            "replicas": replicas,
            "num_devices": None if replicas is None else self.num_devices,
            "cost_per_hour": (kind.price or 0.0) * self.num_devices if has_cost else None,
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

    @property
    def num_devices(self) -> int:
        return (self.replicas or 1) * self.option.shape.devices

    def seconds(self, metric: str, statistic: str) -> float | None:
        """A simulated time, at the end of its range that is judged."""
        found = self.simulated.times[metric][statistic]
        return found * self.ttft_factor if found is not None and metric == "ttft" else found

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
        step, ttft = _factors(option.probe.serving, self.targets.confidence)
        question = replica_of(self.free.of(shape), self.kind, shape.tensor, shape.stages, replicas or 1)
        found = self.simulation.run(question, self.targets, replicas, self._num_requests, step)
        option = option._replace(most_running=found.most_running)
        one = Finalist(option, replicas, found, step, ttft, None, 0.0)
        for limit in self.targets.limits:
            share = (one.seconds(limit.metric, limit.statistic) or 0.0) / limit.seconds
            if share > one.worst:
                missed = _missed(limit, share, is_alone=replicas is None) if share > 1 else None
                one = one._replace(missed=missed, worst=share)
        if found.refused:
            one = one._replace(missed=f"{found.refused:,} of {found.requests:,} requests are too long for the cache")
        return one

    def _count(self, option: Option) -> int:
        """Enough requests for the highest percentile, and for a run that is much longer than a request.

        `option` is the first guess, so that about as many requests run at once as when the targets are met.
        """
        if self.simulation.num_requests is not None:
            return self.simulation.num_requests
        beyond = ceil(_BEYOND / (1 - (self.targets.highest_percentile or 50) / 100))
        in_flight = option.replicas * option.probe.running
        return min(max(beyond, _TURNOVERS * in_flight, _FEWEST_REQUESTS), _MOST_REQUESTS)


def find_simulated(traffic: Traffic, judge: Judge, most: int = DEFAULT_FINALISTS) -> Option | Trouble:
    """The layout with the fewest devices that meets all targets in the simulation, or why the last one does not.

    At most `most` layouts are simulated. Of two with as many devices, the one further below its targets wins.
    """
    trouble: Trouble | None = None
    for options, reason in _candidates(traffic, judge.kind, most):
        trouble = reason or trouble
        best: Finalist | None = None
        refusal: UsageError | None = None
        losers: list[tuple[int, int, str]] = []
        for option in options[:most]:
            try:
                found = _smallest_found(judge, option, best)
            except UsageError as error:  # a layout that is not simulated, such as attention replicas
                refusal = error
                continue
            if found is None:
                devices = option.shape.devices
                losers.append((2, devices, f"{option.shape}: {more_devices(judge.kind, devices)}"))
            elif found.missed is not None:
                losers.append((1, found.num_devices, f"{found}: {found.missed}"))
            elif best is None:
                best = found
            else:
                best, worse = sorted([best, found], key=_devices_then_worst)
                losers.append((0, worse.num_devices, f"{worse}: {_why_worse(judge.kind, best, worse)}"))
        if best is not None:
            why = min(losers)[2] if losers else None if trouble is None else trouble.reason
            return best.option._replace(next_layout=why)
        if losers:
            trouble = Trouble(losers[-1][2])
        elif refusal is not None:
            raise refusal
    return trouble or Trouble("the model cannot be split over these devices")


def simulate_best(traffic: Traffic, judge: Judge, most: int) -> Option | Trouble:
    """The layout of the closed form. It and the next ones, `most` in all, are simulated, which does not change it."""
    trouble: Trouble | None = None
    for found in find_options(traffic, judge.kind, max(most, 2)):
        trouble = found.trouble
        if found.options:
            first, *_ = [judge.at(option, option.replicas) for option in found.options[:most]]
            return first.option._replace(next_layout=why_not(judge.kind, *found))
    return trouble or Trouble("the model cannot be split over these devices")


def _candidates(traffic: Traffic, kind: Kind, most: int) -> Iterator[tuple[list[Option], Trouble | None]]:
    """The layouts to simulate, in the order of what the closed form says about their means, and why others are not.

    All layouts that hold the requests are candidates: a simulated percentile may be below the mean of the closed form.
    Only of all layouts together, which are hundreds, those are left out whose mean misses a target.
    """
    if traffic.all_layouts:
        for found in find_options(traffic, kind, most):
            if found.options:
                yield found.options, found.trouble
                return
    free = traffic._replace(targets=traffic.targets.without_limits())
    for found in find_options(free, kind, most):
        options = [_first_guess(traffic, free, kind, option) for option in found.options]
        options.sort(key=lambda one: (one.num_devices, -one.tokens_per_second))
        yield options, found.trouble


def _first_guess(traffic: Traffic, free: Traffic, kind: Kind, option: Option) -> Option:
    """The number of replicas to simulate first: that of the closed form, or as many as there can be if it has none."""
    shape = option.shape
    guess = smallest(traffic.of(shape), kind, shape)
    if isinstance(guess, Option):
        return guess
    most = _most_replicas(traffic.targets, shape, kind.max_devices)
    return option._replace(replicas=most, probe=with_replicas(free, kind, shape, most))


def _smallest_found(judge: Judge, option: Option, best: Finalist | None) -> Finalist | None:
    """The layout with the fewest replicas that meet the targets, or one that does not.

    With a `best` so far it has no more devices than that, and None is a layout of which one replica has more.
    """
    most = _most_replicas(judge.targets, option.shape, judge.kind.max_devices if best is None else best.num_devices)
    if not most:
        return None
    # With a best layout, one simulation usually decides. Without, doubling would go on to the last device.
    first = judge.at(option, None if best is None else most)
    return first if first.missed is not None else judge.fewest(option, most)


def _most_replicas(targets: Targets, shape: Shape, num_devices: int) -> int:
    """The most replicas on so many devices. In a closed loop, every replica has a client."""
    most = num_devices // shape.devices
    return most if targets.concurrency is None else min(most, targets.concurrency)


def _devices_then_worst(one: Finalist) -> tuple[int, float]:
    return one.num_devices, one.worst


def _why_worse(kind: Kind, better: Finalist, worse: Finalist) -> str:
    if worse.num_devices > better.num_devices:
        return more_devices(kind, worse.num_devices)
    shares = f"{worse.worst:.0%}", f"{better.worst:.0%}"
    if shares[0] == shares[1]:
        return "as many devices, and as close to its targets"
    return f"as many devices, but {shares[0]} of a target instead of {shares[1]}"


def _factors(serving: Mapping[str, Any], confidence: int) -> tuple[float, float]:
    """The factor on the seconds of a step, and the factor that is left for TTFT. Both are 1 without a range."""
    step, ttft = (
        serving[f"{name}_high_seconds"] / serving[f"{name}_seconds"]
        if confidence == RANGE_CONFIDENCE and serving.get(f"{name}_high_seconds") is not None
        else 1.0
        for name in ("tpot", "ttft")
    )
    return step, max(1.0, ttft / step)


def _missed(limit: Limit, share: float, is_alone: bool) -> str:
    name = f"{limit.metric.upper()} {limit.statistic}{' of requests alone' if is_alone else ''}"
    return f"{name} is {seconds_text(share * limit.seconds)} and the limit is {seconds_text(limit.seconds)}"
