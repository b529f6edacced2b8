"""The load to serve, and the longest allowed times: of a mean, or of a percentile of the requests.

What the search of a plan asks of a simulation is here too (`Simulates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol

from kvcalc.errors import UsageError
from kvcalc.notes import Note
from kvcalc.question.lengths import known_lengths
from kvcalc.question.question import Question
from kvcalc.question.sessions import Sessions
from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.load import Load, check_load
from kvcalc.throughput.speed import known_range
from kvcalc.units import parse_seconds

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The percentiles that a simulation counts.
PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "e2e")

MOST_BUSY = 0.9
"""Requests at random come in groups. For replicas that are busier than this, the means of the short form hide that a
queue grows without bound, so only a simulation may choose them."""


class Limit(NamedTuple):
    """The longest allowed time of a metric (`ttft`, `tpot` or `e2e`), for its mean if `percentile` is None."""

    metric: str
    seconds: float
    percentile: int | None

    @property
    def statistic(self) -> str:
        """What the limit is compared with: `mean`, `p50`, `p90`, `p95` or `p99`."""
        return "mean" if self.percentile is None else f"p{self.percentile}"


class Targets(NamedTuple):
    """The load to serve: concurrent requests, requests per second or users. And the longest allowed times in seconds.

    A user thinks for `think_time` seconds on average between messages. With `sessions`, requests are their turns. A
    target without a percentile limits the mean. The question says with which confidence it must be met
    (`SpeedQuestion`). With a deadline, the load is a job of `num_requests` requests, which may wait and must end in
    time; `requests_per_second` is the rate that they need at least.
    """

    concurrency: int | None
    requests_per_second: float | None
    max_ttft_seconds: float | None = None
    max_tpot_seconds: float | None = None
    max_e2e_seconds: float | None = None
    ttft_percentile: int | None = None
    tpot_percentile: int | None = None
    e2e_percentile: int | None = None
    num_requests: int | None = None
    deadline_seconds: float | None = None
    users: int | None = None
    think_time: float | None = None
    sessions: Sessions | None = None

    @property
    def clients(self) -> int | None:
        """The clients that send the next request after each answer. None if requests arrive at a rate."""
        return self.arrivals(Load()).clients

    @property
    def clients_without_pause(self) -> int | None:
        """The clients that send the next request at once. None for users who think, and for requests at a rate."""
        return None if self.think_seconds else self.clients

    @property
    def think_seconds(self) -> float:
        """How long a client thinks on average before it sends the next request."""
        return self.arrivals(Load()).think_seconds

    def arrivals(self, load: Load) -> Load:
        """A load whose requests arrive as these do."""
        return load._replace(
            requests_per_second=self.requests_per_second, concurrency=self.concurrency, users=self.users,
            think_time=self.think_time, sessions=self.sessions,
        )  # fmt: skip

    @property
    def limits(self) -> list[Limit]:
        """The limits that were given."""
        most = (self.max_ttft_seconds, self.max_tpot_seconds, self.max_e2e_seconds)
        of = (self.ttft_percentile, self.tpot_percentile, self.e2e_percentile)
        return [Limit(name, seconds, part) for name, seconds, part in zip(METRICS, most, of) if seconds is not None]

    @property
    def highest_percentile(self) -> int | None:
        """The highest percentile that a target names. None if all targets limit means."""
        return max((row.percentile for row in self.limits if row.percentile is not None), default=None)

    @property
    def limits_waiting(self) -> bool:
        """Whether a limit is on a time that includes the time in the queue."""
        return self.max_ttft_seconds is not None or self.max_e2e_seconds is not None

    @property
    def most_busy(self) -> float:
        """How busy a layout may be. A limit on the wait, or a deadline, itself says how long the queue may be."""
        return 1.0 if self.limits_waiting or self.deadline_seconds is not None else MOST_BUSY

    def seconds_for(self, requests_per_second: float, stay_seconds: float) -> float:
        """How long a job takes at this rate: the last requests stay for `stay_seconds`."""
        return (self.num_requests or 0) / requests_per_second + stay_seconds

    def describe(self, confidence: int) -> documents.PlanTargets:
        """The `targets` part of a document."""
        given, sessions = self._asdict(), self.sessions
        del given["sessions"], given["think_time"]
        given["think_seconds"] = self.think_seconds if self.clients is not None else None
        given["session_turns"] = None if sessions is None else sessions.turns
        given["session_growth_tokens"] = None if sessions is None else sessions.growth_tokens
        return {**given, "confidence": confidence}  # type: ignore[typeddict-item]

    def larger(self, headroom: float) -> Targets:
        """The targets for a load that is larger by the share `headroom`."""

        def more(number: int | None) -> int | None:
            return None if number is None else ceil(number * (1 + headroom))

        rate = self.requests_per_second
        return self._replace(
            requests_per_second=None if rate is None else rate * (1 + headroom), concurrency=more(self.concurrency),
            num_requests=more(self.num_requests), users=more(self.users),
        )  # fmt: skip

    def of_share(self, share: float) -> Targets:
        """The targets of a share of the replicas. What a router sends at random to one of them arrives at random."""

        def part(number: int | None) -> int | None:
            return None if number is None else max(1, round(number * share))

        rate = self.requests_per_second
        return self._replace(
            requests_per_second=None if rate is None else rate * share, concurrency=part(self.concurrency),
            users=part(self.users),
        )  # fmt: skip

    def without_limits(self) -> Targets:
        """The same load without limits."""
        return Targets(
            self.concurrency, self.requests_per_second, users=self.users, think_time=self.think_time,
            sessions=self.sessions,
        )  # fmt: skip


def check_arrivals(targets: Targets) -> None:
    """Raise UsageError (exit 2) for no load or two, or for users who do not think. A trace has a rate."""
    any_length = known_lengths(1)
    check_load(targets.arrivals(Load(any_length, any_length)))


def of_job(targets: Targets, num_requests: int | None, deadline_seconds: float) -> Targets:
    """Targets for a job that has to finish by its deadline.

    Raises UsageError (exit 2) if another load or a limit on a time is given too.
    """
    if num_requests is None:
        raise UsageError("--deadline needs the number of requests", "for example --requests 10M")
    if targets.clients is not None or targets.requests_per_second is not None:
        raise UsageError("--deadline: the rate follows from --requests", "leave out the other load")
    if targets.limits:
        name = targets.limits[0].metric
        raise UsageError(f"--max-{name}: the requests of a job with a --deadline may wait", "leave one of them out")
    return targets._replace(
        requests_per_second=num_requests / deadline_seconds, num_requests=num_requests,
        deadline_seconds=deadline_seconds,
    )  # fmt: skip


def limits_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Targets` that --max-ttft, --max-tpot and --max-e2e state as `1s` or `1s@p99`.

    UsageError (exit 2) for another text, or for a percentile that is not counted.
    """
    limits: dict[str, Any] = {}
    for metric in METRICS:
        text, option = given[f"max_{metric}"], f"--max-{metric}"
        if text is None:
            continue
        time, at, statistic = text.partition("@")
        number = statistic.strip().casefold().removeprefix("p")
        if at and number not in map(str, PERCENTILES):
            names = ", ".join(f"p{percentile}" for percentile in PERCENTILES)
            raise UsageError(f"{option} {text[:40]!a}: not one of {names}", f"{option} {time.strip()[:20]}@p99")
        limits[f"max_{metric}_seconds"] = parse_seconds(time, option)
        limits[f"{metric}_percentile"] = int(number) if at else None
    return limits


def check_percentiles(targets: Targets) -> None:
    """Raise UsageError (exit 2) for a percentile that is not counted, or one without a limit."""
    for metric in METRICS:
        percentile, limit = getattr(targets, f"{metric}_percentile"), getattr(targets, f"max_{metric}_seconds")
        if percentile is not None and percentile not in PERCENTILES:
            raise UsageError(f"{metric}_percentile {percentile!r}: must be one of {', '.join(map(str, PERCENTILES))}")
        if percentile is not None and limit is None:
            raise UsageError(f"{metric}_percentile needs max_{metric}_seconds")


class Simulated(NamedTuple):
    """What one simulation found: for `ttft`, `tpot` and `e2e` the seconds of `mean`, `p50`, `p90`, `p95` and `p99`.

    `most_running` is the limit of running requests of a DP rank. `refused` of the `requests` can never run.
    `backlog_seconds` is the longest wait in the queue if the queue grows without bound, None if the replicas keep up.
    `notes` are about what was simulated in another way than asked. `stages` are the mean seconds that a request of two
    pools spends before its first decode step, by the keys of `documents.SplitPoolsTtftParts`.
    """

    times: Mapping[str, Mapping[str, float | None]]
    requests: int
    refused: int
    most_running: int
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    backlog_seconds: float | None = None
    notes: tuple[Note, ...] = ()
    stages: Mapping[str, float] = {}

    def times_as_many(self, factor: float) -> Simulated:
        """The same on so many times as many replicas, each with its share of the load."""
        return self._replace(
            requests_per_second=factor * self.requests_per_second, tokens_per_second=factor * self.tokens_per_second
        )

    def describe(self, factors: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
        """The times and the rates of a row of the plan.

        `factors` are those on TTFT and TPOT for the ends of their ranges, and for the times that are judged.
        """
        row = dict[str, float | None]()
        for metric, (low, high, judged) in factors.items():
            seconds = self.times[metric]["mean"]
            ends = (None, None) if seconds is None else known_range(low * seconds, high * seconds)
            row |= {f"{metric}_seconds": seconds, f"{metric}_judged_seconds": seconds and judged * seconds}
            row |= {f"{metric}_low_seconds": ends[0], f"{metric}_high_seconds": ends[1]}
        known, tokens, (low, high, _) = row["tpot_low_seconds"], self.tokens_per_second, factors["tpot"]
        return row | {
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": tokens,
            "tokens_per_second_low": known and tokens / high,
            "tokens_per_second_high": known and tokens / low,
        }


class Pools(NamedTuple):
    """The questions about one prefill and one decode instance, and their numbers. None: requests one after the other.

    `transfer` are the bytes per second of the link between them.
    """

    prefill: Question
    decode: Question
    numbers: tuple[int, int] | None
    transfer: int


class Simulates(Protocol):
    """Simulates the requests of a plan."""

    @property
    def seed(self) -> int | None:
        """The seed of the arrivals and the lengths. None if a trace has both."""

    def seeded(self, more: int) -> Simulates:
        """The same load with another seed."""

    @property
    def num_requests(self) -> int | None:
        """The number of requests that was asked for, or that a trace has. None for a default."""

    @property
    def router(self) -> str:
        """Which replica gets a request (`simulation.routed`)."""

    @property
    def trace(self) -> documents.PlanTrace | None:
        """The `trace` part of the plan's document, with the rates of a trace that has the arrivals. None without."""

    @property
    def notes(self) -> Sequence[Note]:
        """Notes about rows of a trace that are left out."""

    def run(
        self, question: Question, targets: Targets, replicas: int | None, num_requests: int | None, step_factor: float
    ) -> Simulated:
        """The times of `num_requests` requests on `replicas` replicas, or of one after the other if None.

        `num_requests` is None for as many as make the means known.

        The times of all steps are multiplied by `step_factor`. UsageError (exit 2) for what is not simulated.
        """

    def run_pools(self, pools: Pools, targets: Targets, num_requests: int | None, step_factor: float) -> Simulated:
        """The same on separate prefill and decode instances."""
