"""Compute how many of the requests to serve fit at their full length."""

from __future__ import annotations

from kvcalc.notes import Note
from kvcalc.planning.admission import most_at_once, wanted_requests
from kvcalc.planning.budget import budget
from kvcalc.planning.case import Case
from kvcalc.planning.throughput import Speed, speed_of


def at_load(case: Case) -> Case:
    """The case with the number of requests that fit as its batch. Returns `case` itself if it serves no requests.

    If the engine is to choose the context, the result has that context. If as many layers as fit are to be on the
    device, the result has that number.
    """
    chosen: Note | None = None
    if case.question.fits_context:
        from kvcalc.planning.auto_context import with_auto_context

        case, chosen = with_auto_context(case)
    if case.engine.placement is not None:
        from kvcalc.planning.offload import place_layers

        case = place_layers(case)
    if chosen is not None:
        case = case._replace(notes=(*case.notes, chosen))
    if case.question.speed is None or case.question.speed.request_tokens is None:
        return case
    return case.at(case.workload.context_tokens, _fitting_requests(case))


def _fitting_requests(case: Case) -> int:
    """The number of requests that fit at their full length: at most the concurrency and the engine's maximum.

    The result is 1 if not even one request fits, so that the answer shows how much memory one request takes.
    """
    found = budget(case)
    limit = None if isinstance(found, str) else found.running_limit()
    speed, asked = speed_of(case, []), case.question.speed
    if isinstance(speed, Speed):
        wanted = wanted_requests(case, most_at_once(case, found))
    else:
        wanted = (asked and asked.concurrency) or 1
    return max(1, wanted if limit is None else min(wanted, limit))
