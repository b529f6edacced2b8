"""How long a simulation runs: with twice as many requests again and again, until its times no longer move.

A short run says little about a percentile, and nothing about a queue that grows slowly. The times have settled if those
of the first half of the requests are close to those of all. A run that ends unsettled has a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcalc.notes import Note, describe_notes
from kvcalc.simulation.loads.load import MEANS_AND_P99, Load, Statistic
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.results import counted, e2e_of, percentile, tpot_of, ttft_of

if TYPE_CHECKING:
    import kvcalc.documents as documents

# How much the mean and a percentile of a settled time may move, as shares of it.
_MEAN, _PERCENTILE = 0.02, 0.1
_TIMES = {"ttft": ttft_of, "tpot": tpot_of, "e2e": e2e_of}
# The largest number of requests if none is given.
_MOST = 16_000

Run = Callable[[Load], "tuple[documents.Simulate, Sequence[Request]]"]
"""Simulates a load. Returns the document, and the requests that were served in the order in which they were sent."""


def simulate_settled(load: Load, run: Run) -> documents.Simulate:
    """The document of a load with as many requests as settle its times, or with those that it says itself."""
    document, requests = run(load)
    if load.trace is not None or load.num_requests is not None or load.is_benchmark:
        return document
    number = load.first_number
    while document["results"]["keeps_up"] and (moved := largest_move(counted(requests, load), load.settling)) > 1:
        if 2 * number > _MOST:
            text = (
                f"the times still move after {number:,} requests: means by up to {_MEAN * moved:.0%}, or percentiles "
                f"by up to {_PERCENTILE * moved:.0%}; --requests {2 * number} simulates more"
            )
            return {**document, "warnings": [*document["warnings"], *describe_notes([Note("load", "unsettled", text)])]}
        number *= 2
        document, requests = run(load._replace(fewest_requests=number))
    return document


def largest_move(requests: Sequence[Request], settling: Sequence[Statistic] = MEANS_AND_P99) -> float:
    """How far the times of the first half of the requests are from those of all, as a share of what is allowed."""
    largest, half = 0.0, len(requests) // 2
    for metric, at in settling:
        first, whole = (
            sorted(time for request in part if (time := _TIMES[metric](request)) is not None)
            for part in (requests[:half], requests)
        )
        if first and whole[-1]:
            allowed = _MEAN if at is None else _PERCENTILE
            before, after = (
                sum(times) / len(times) if at is None else percentile(times, at / 100) for times in (first, whole)
            )
            largest = max(largest, abs(before / after - 1) / allowed)
    return largest
