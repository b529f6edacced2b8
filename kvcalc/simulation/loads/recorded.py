"""The requests of a trace, read once for all simulations of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.notes import Note
from kvcalc.question.request_lengths import Lengths, lengths_of_pairs
from kvcalc.records import NamedTuple
from kvcalc.simulation.loads.load import answered

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.traces import TraceRequest

# A plan serves the busiest part of a trace that is this long.
PEAK_SECONDS = 60.0


class Recording(NamedTuple):
    """The requests of a trace that have an answer, in the order of their arrival, and the notes about its other rows.

    The times between arrivals are divided by `scale_rate`.
    """

    name: str
    scale_rate: float
    requests: list[TraceRequest]
    notes: list[Note]

    @property
    def lengths(self) -> Lengths:
        """The lengths of the requests."""
        return lengths_of_pairs(
            ((request.prompt_tokens, request.answer_tokens) for request in self.requests), self.name
        )

    @property
    def duration_seconds(self) -> float:
        """The seconds between the first and the last arrival."""
        return (self.requests[-1].arrival_seconds - self.requests[0].arrival_seconds) / self.scale_rate

    @property
    def requests_per_second(self) -> float:
        """The mean rate of the requests."""
        return (len(self.requests) - 1) / self.duration_seconds

    @property
    def peak_requests_per_second(self) -> float:
        """The rate of the busiest minute, or the mean rate if the trace is shorter than that."""
        times = [request.arrival_seconds / self.scale_rate for request in self.requests]
        first = most = 0
        for last, seconds in enumerate(times):
            while times[first] <= seconds - PEAK_SECONDS:
                first += 1
            most = max(most, last + 1 - first)
        return max(self.requests_per_second, most / PEAK_SECONDS)

    def describe(self) -> documents.PlanTrace:
        """The `trace` part of the document of `kvcalc plan`."""
        return {
            "name": self.name,
            "scale_rate": self.scale_rate,
            "requests": len(self.requests),
            "duration_seconds": self.duration_seconds,
            "requests_per_second": self.requests_per_second,
            "peak_requests_per_second": self.peak_requests_per_second,
        }


def record(
    trace: Iterable[TraceRequest], name: str, scale_rate: float = 1.0, num_requests: int | None = None
) -> Recording:
    """Read a trace, or its first `num_requests` requests.

    UsageError (exit 2) if it has no requests, no times of arrival, or only one time, which gives no rate.
    """
    notes: list[Note] = []
    recording = Recording(name, scale_rate, answered(trace, name, num_requests, notes), notes)
    if recording.duration_seconds <= 0:
        raise UsageError(
            f"--trace {name}: all requests arrive at the same time, which gives no rate",
            f"--lengths {name}, with --concurrency or --requests-per-second",
        )
    return recording
