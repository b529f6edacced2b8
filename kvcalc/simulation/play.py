"""A load on replicas of a server: what happens to its requests."""

from __future__ import annotations

from kvcalc.errors import ModelError, UsageError
from kvcalc.notes import Note
from kvcalc.question.fields import IN_TURN
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.server.admission import accept_prompts
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.simulation.common_prefix import (
    CommonPrefix,
    Named,
    check_no_names,
    name_prefix,
    name_repeated,
    name_sessions,
)
from kvcalc.simulation.fleet import Progress, run_load
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import Load, Requests
from kvcalc.simulation.loads.supply import Supply
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.simulation.results import Outcome
from kvcalc.simulation.routed import fleet_of
from kvcalc.simulation.scheduler import Scheduler, scheduler_of
from kvcalc.throughput.roofline import SpeedModel


class Played(NamedTuple):
    """The scheduler of a server, and what happened to a load."""

    scheduler: Scheduler
    outcome: Outcome


def play(
    case: Case, model: SpeedModel, requests: Requests, load: Load, replicas: int, step_factor: float, notes: list[Note],
    progress: Progress | None = None, *, is_detailed: bool = False, assumes: bool = False,
    prefix: CommonPrefix | None = None,
) -> Played:  # fmt: skip
    """What happens to the `requests` of a load on replicas of a case, whose context is that of the longest request.

    `prefix` is what all requests have in common. Without `is_detailed`, there are no times between tokens
    and no states over time. With `assumes`, an engine whose scheduler is not known runs requests beside each other.
    """
    question, longest = case.question, case.workload.context_tokens
    accept_prompts(case, min(requests.longest_prompt, longest - 1), notes)
    scheduler = scheduler_of(case, model, longest, assumes=assumes)
    supply = Supply(requests, longest, scheduler.fits)
    shared_tokens = shared_tokens_of(case, scheduler, requests.block_tokens, notes)
    named = named_in(question, scheduler, requests, load, replicas, prefix, notes)
    if named is not None:
        supply.name, shared_tokens = named
    if load.distinct_prompts is not None and shared_tokens is None and replicas > 1 and load.router != IN_TURN:
        text = f"--router {load.router}: which replica has had a prompt is only followed in turn"
        raise UsageError(text, f"--router {IN_TURN}, or one replica")
    times = ModelTimes(model, step_factor)

    def make(arrivals: Arrivals) -> Server:
        server = scheduler.server(times, arrivals, shared_tokens)
        server.first_seconds = step_factor * scheduler.first_wait(load, model, supply.taken, replicas)
        if not is_detailed:
            server.keep_sums()
        return server

    fleet = fleet_of(supply, replicas, make, load.router, load.seed + 2, shared_tokens, load.clients)
    return Played(scheduler, run_load(fleet, load, supply, notes, progress))


def named_in(
    question: Question, scheduler: Scheduler, requests: Requests, load: Load, replicas: int,
    prefix: CommonPrefix | None, notes: list[Note],
) -> Named | None:  # fmt: skip
    """How the blocks of requests are named that share a prefix or a session, or are sent again. None if none are."""
    if prefix is not None:
        check_no_names(requests.block_tokens)
        return name_prefix(prefix, scheduler, requests.shortest_prompt, notes)
    if load.sessions is not None:
        return name_sessions(question, scheduler, requests.longest_tokens, notes)
    if (distinct := load.distinct_prompts) is None or (load.number is not None and distinct >= load.number):
        return None
    return name_repeated(question, scheduler, requests.longest_prompt, distinct, replicas, notes)


def known_speed(case: Case, notes: list[Note]) -> Speed:
    """The speed of a case. ModelError (exit 3) if it is not known."""
    speed = speed_of(case, notes)
    if isinstance(speed, str):
        raise ModelError(f"{case.model.name} cannot be simulated: {speed}")
    return speed


def shared_tokens_of(case: Case, scheduler: Scheduler, named_tokens: int | None, notes: list[Note]) -> int | None:
    """The tokens in a named block of the trace if requests share such blocks, with a note if they do not."""
    if named_tokens is None:
        return None
    why = scheduler.cannot_share(named_tokens)
    if why is None and case.engine.prefixes_off:
        why = "prefix caching is off"
    if why is None:
        return named_tokens
    notes.append(Note("load", "not-shared", f"the prefixes that requests of the trace share are not found: {why}"))
    return None
