"""What a plan asks of a simulation. `planning` does not import `simulation`, which has one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvcalc.notes import Note
from kvcalc.planning.plan.targets import Targets
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple


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
