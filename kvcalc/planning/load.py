"""Compute how many of the requests to serve fit at their full length."""

from __future__ import annotations

from kvcalc.planning.admission import most_at_once
from kvcalc.planning.budget import budget
from kvcalc.planning.case import Case
from kvcalc.planning.throughput import Speed, speed_of


def at_load(case: Case) -> Case:
    """The case with the number of requests that fit as its batch. Returns `case` itself if it serves no requests."""
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return case
    return case.at(case.workload.context_tokens, _fitting_requests(case))


def _fitting_requests(case: Case) -> int:
    """The number of requests that fit at their full length: at most the concurrency and the engine's maximum.

    The result is 1 if not even one request fits, so that the answer shows how much memory one request takes.
    """
    found = budget(case)
    limit = None if isinstance(found, str) else found.running_limit()
    wanted = None if case.question.speed is None else case.question.speed.concurrency
    speed = speed_of(case, [])
    if isinstance(speed, Speed):
        most = most_at_once(case, speed.model.constants.max_sequences)
        wanted = most if wanted is None else min(wanted, most)
    wanted = wanted or 1
    return max(1, wanted if limit is None else min(wanted, limit))
