"""Compute how many of the requests to serve run at once. The others wait until there is room in the cache."""

from __future__ import annotations

from kvcalc.planning.budget import budget
from kvcalc.planning.case import Case
from kvcalc.planning.throughput import Speed, speed_of


def at_load(case: Case) -> Case:
    """The case with the number of running requests as its batch. Returns `case` itself if it serves no requests.

    If as many layers as fit are to be on the device, the result has that number.
    """
    if case.rules.placement is not None:
        from kvcalc.planning.offload import place_layers

        case = place_layers(case)
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return case
    return case.at(case.workload.context_tokens, _running_requests(case))


def _running_requests(case: Case) -> int:
    """The number of requests that run at once: as many as fit, at most the requested concurrency.

    Without a requested concurrency, the limit is the engine's default maximum. The result is 1 if not even one request
    fits, so that the answer shows how much memory one request takes.
    """
    found = budget(case)
    limit = None if isinstance(found, str) else found.running_limit()
    wanted = None if case.question.speed is None else case.question.speed.concurrency
    if wanted is None:
        speed = speed_of(case, [])
        wanted = speed.model.constants.max_sequences if isinstance(speed, Speed) else 1
    return max(1, wanted if limit is None else min(wanted, limit))
