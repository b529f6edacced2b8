"""The load of a case by the short form, which orders the candidates of a search. What is printed is simulated."""

from __future__ import annotations

from kvcalc.notes import Note
from kvcalc.question.lengths import known_lengths
from kvcalc.server.admission import accept_prompts, most_at_once, wanted_requests
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case
from kvcalc.simulation.served import Served
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.scheduling import StepRules
from kvcalc.throughput.serving import serve


def short_form_of(case: Case, model: SpeedModel, notes: list[Note]) -> Served | None:
    """The times of a case's load by `kvcalc.throughput.serving.serve`. None if it serves no requests."""
    speed = case.question.speed_asked
    prompt, answer = speed.prompt_tokens, speed.answer_tokens
    if prompt is None or answer is None:
        return None
    accept_prompts(case, prompt, notes)
    most = most_at_once(case, budget(case))
    places = places_of(case, wanted_requests(case, most))
    clients = speed.concurrency or int(places)
    hit_share = max(speed.prefix_hit_rate, 0.0 if case.engine.prefixes_off else speed.repeated_share)
    short = serve(
        model, prompt, answer, clients, places, hit_share * prompt, step_rules(case, most),
        is_benchmark=speed.benchmark,
    )  # fmt: skip
    return Served(
        known_lengths(prompt), known_lengths(answer), clients, min(places, clients), short.tpot_seconds,
        short.ttft_seconds, short.tokens_per_second, short.requests_per_second, short.prefill_share,
    )  # fmt: skip


def step_rules(case: Case, most: int) -> StepRules:
    """How the engine puts prompts into steps; the usual way if its scheduler is not known. `most` is `most_at_once`."""
    schedule = case.engine.schedule()
    if schedule is None:
        return StepRules()
    return schedule.steps(max(1, most // case.layout.data_parallel_size), case.workload.context_tokens)


def places_of(case: Case, wanted: int) -> int:
    """How many of `wanted` requests hold their cache at the same time.

    The batch of the case is the number that fits at full length, or that was asked for without requests to serve. An
    engine that reserves the full length runs no more. The others hold requests of all ages, with half of their answer
    on average.
    """
    fitting, speed = case.workload.batch_size, case.question.speed_asked
    prompt, answer, schedule, room = speed.prompt_tokens, speed.answer_tokens, case.engine.schedule(), budget(case)
    if prompt is None or answer is None:
        return fitting
    if fitting >= wanted or schedule is None or schedule.reserves_answer or not isinstance(room, Budget):
        return min(fitting, wanted)
    limit = room.running_limit(prompt + answer // 2)
    return wanted if limit is None else max(fitting, min(wanted, limit))
