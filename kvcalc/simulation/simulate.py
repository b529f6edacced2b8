"""Simulate replicas of an engine that serve requests, and describe what a client sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import DoesNotFitError, ModelError, UsageError
from kvcalc.model.describe import describe_model
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.gpus import describe_hardware
from kvcalc.planning.serving.admission import accept_prompts, check_serves
from kvcalc.planning.serving.throughput import Speed, speed_of
from kvcalc.question.fields import IN_TURN
from kvcalc.question.question import Question, setting_texts
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.case import Case
from kvcalc.server.layout import count_replicas
from kvcalc.server.resolve import with_engine
from kvcalc.simulation.common_prefix import case_of, check_no_names, check_reuse, repeat_prompts, share_prefix
from kvcalc.simulation.coupled import Progress
from kvcalc.simulation.loads.arrivals import Arrivals
from kvcalc.simulation.loads.load import Load, check_load, requests_of
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.replicas.server import Server
from kvcalc.simulation.replicas.times import ModelTimes
from kvcalc.simulation.results import Limits, describe_results, describe_timeline, describe_times
from kvcalc.simulation.routed import serve
from kvcalc.simulation.scheduler import Scheduler, scheduler_of, start_notes
from kvcalc.simulation.settled import simulate_settled
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.speed import known_range, range_factors

if TYPE_CHECKING:
    import kvcalc.documents as documents


def simulate(
    question: Question,
    load: Load,
    limits: Limits = Limits(),
    *,
    replicas: int | None = None,
    step_factor: float = 1.0,
    progress: Progress | None = None,
    is_detailed: bool = True,
) -> documents.Simulate:
    """The document of `kvcalc simulate`. Without times between tokens and states over time if not `is_detailed`.

    `replicas` are as many as the devices hold if None. The times of all steps are multiplied by `step_factor`. The
    question must have `devices`; of its `speed`, the calibration, --ep and the hit rate are used, and of its `reuse`
    the common prefix. Raises UsageError (exit 2), ModelError (exit 3) if the speed is
    not known, and DoesNotFitError (exit 4) if no request can run.
    """
    run = partial(
        _simulated, question, limits=limits, replicas=replicas, step_factor=step_factor, progress=progress,
        is_detailed=is_detailed,
    )  # fmt: skip
    return simulate_settled(load, run)


def _simulated(
    question: Question, load: Load, limits: Limits, replicas: int | None, step_factor: float,
    progress: Progress | None, is_detailed: bool,
) -> tuple[documents.Simulate, Sequence[Request]]:  # fmt: skip
    """The document of one run, and the requests that were served."""
    question, devices, requests, named_tokens, of_load = ask_about(question, load)
    check_serves(question.engine, setting_texts(question.engine_settings or {}))
    if replicas and devices.num_devices % replicas == 0 and question.tensor_parallel_size is None:
        # All devices of a replica without --tp, as of one server.
        question = question._replace(devices=Devices(devices.gpu, devices.num_devices // replicas))
    check_reuse(question)
    (case, prefixes), longest = case_of(question), question.context_tokens or longest_of(requests)
    if case.engine.placement is not None:
        from kvcalc.server.offload import place_layers

        case = place_layers(case)
    notes = [*case.notes, *of_load]
    accept_prompts(case, max(request.prompt_tokens for request in requests), notes)
    speed = known_speed(case, notes)
    number = replicas or count_replicas(case.devices.num_devices, case.layout)
    _check_devices(devices.num_devices, number, case.layout.num_devices)
    scheduler = scheduler_of(case, speed.model, longest)
    notes += start_notes(case)
    fitting = [request for request in taken(requests, question) if scheduler.fits(request)]
    check_fitting(requests, fitting, question, notes)
    shared_tokens = shared_tokens_of(case, scheduler, named_tokens, notes)
    if question.reuse is not None and prefixes is not None:
        check_no_names(named_tokens)
        shared_tokens = share_prefix(prefixes, scheduler, fitting, question.reuse.prefix_tokens, notes)
    if (distinct := repeated(load, requests)) is not None:
        shared_tokens = repeat_prompts(question, scheduler, fitting, distinct, number, notes)
        if shared_tokens is None and number > 1 and load.router != IN_TURN:
            text = f"--router {load.router}: which replica has had a prompt is only followed in turn"
            raise UsageError(text, f"--router {IN_TURN}, or one replica")
    if load.concurrency is not None and load.concurrency < number:
        raise UsageError(f"--concurrency {load.concurrency} is less than {number} replicas", "use fewer --replicas")
    times = ModelTimes(speed.model, step_factor)
    first_wait = step_factor * scheduler.first_wait(load, speed.model, fitting, number)

    def make(arrivals: Arrivals) -> Server:
        server = scheduler.server(times, arrivals, shared_tokens)
        server.first_seconds = first_wait
        if not is_detailed:
            server.keep_sums()
        return server

    running = serve(fitting, number, make, load.router, load.seed + 2, shared_tokens, load.concurrency, progress)
    ranks = [rank for replica in running for rank in replica.ranks]
    results = describe_results(fitting, ranks, limits, load)
    document: documents.Simulate = {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(case.spec),
        "hardware": {**describe_hardware(case), "num_devices": number * case.layout.num_devices, "replicas": number},
        "engine": describe_engine(case, scheduler),
        "load": describe_load(load, requests, len(requests) - len(fitting)),
        "limits": cast("documents.SimulateLimits", limits._asdict()),
        "results": results,
        "times": describe_times(fitting, ranks, load),
        "timeline": describe_timeline(ranks),
        "step_factor": step_factor,
        "step_range": describe_range(speed, results["mean_running_requests"] / number),
        "warnings": describe_notes(notes),
    }
    return document, fitting


class Asked(NamedTuple):
    """A question for the longest request that its server takes, its devices, the requests, and notes.

    `named_tokens` are those of a block that the trace names.
    """

    question: Question
    devices: Devices
    requests: list[Request]
    named_tokens: int | None
    notes: list[Note]


def ask_about(question: Question, load: Load) -> Asked:
    """The question of a simulation for the longest request, and the requests of its load.

    The context of the question is the longest request that the server takes; None takes all requests. Raises UsageError
    (exit 2) for a load that is not complete, or without a device.
    """
    check_load(load)
    if question.devices is None:
        raise UsageError("simulate needs a device", "for example --gpu h100")
    if question.fits_context:
        raise UsageError(
            "--context auto: requests that are too long for the cache are refused anyway", "remove --context"
        )
    speed = question.speed_asked
    if load.distinct_prompts is not None:
        for is_given, option in (
            (question.reuse is not None and question.reuse.prefix_tokens, "--prefix-tokens"),
            (speed.prefix_hit_rate, "--prefix-hit-rate"),
        ):
            if is_given:
                raise UsageError(f"{option}: whole prompts are found with --distinct-prompts", "leave it out")
    notes: list[Note] = []
    requests, named_tokens = requests_of(load, speed.prefix_hit_rate, notes)
    longest = question.context_tokens or longest_of(requests)
    asked = with_engine(question)._replace(context_tokens=longest, batch_size=1, speed=speed)
    return Asked(asked, question.devices, requests, named_tokens, notes)


def repeated(load: Load, requests: Sequence[Request]) -> int | None:
    """How many prompts are sent again and again. None if no prompt is sent twice."""
    distinct = load.distinct_prompts
    return None if distinct is None or distinct >= len(requests) else distinct


def longest_of(requests: Sequence[Request]) -> int:
    """The tokens of the longest request."""
    return max(request.total_tokens for request in requests)


def taken(requests: Sequence[Request], question: Question) -> list[Request]:
    """The requests that the server takes: those that are no longer than its context."""
    most = question.context_tokens
    return [request for request in requests if most is None or request.total_tokens <= most]


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


def _check_devices(num_devices: int, replicas: int, each: int) -> None:
    """UsageError (exit 2) if the replicas need more than the devices that were asked for. 1 is no number of its own."""
    if num_devices > 1 and replicas * each > num_devices:
        raise UsageError(
            f"--replicas {replicas}: they need {replicas * each} devices, and there are {num_devices}",
            f"use --num-gpus {replicas * each}, or --replicas {max(1, num_devices // each)}",
        )


def check_fitting(
    requests: Sequence[Request], fitting: Sequence[Request], question: Question, notes: list[Note]
) -> None:
    """A note if some requests can never run.

    UsageError (exit 2) if all of them are longer than the context, and DoesNotFitError (exit 4) if no other one fits.
    """
    if len(fitting) == len(requests):
        return
    longest, most, allowed = longest_of(requests), question.context_tokens, len(taken(requests, question))
    if most is not None and not allowed:
        shortest = min(request.total_tokens for request in requests)
        raise UsageError(
            f"no request is as short as the context of {most:,} tokens: the shortest has {shortest:,}",
            f"--context {longest} takes all of them",
        )
    if not fitting:
        raise DoesNotFitError(
            f"no request fits: the longest has {longest:,} tokens", "kvcalc fit says how long a request may be"
        )
    for refused, why in (
        (len(requests) - allowed, f"longer than the context of {most or 0:,} tokens"),
        (allowed - len(fitting), "too long for the cache"),
    ):
        if refused:
            text = f"{refused:,} of {len(requests):,} requests refused: {why}; the longest has {longest:,} tokens"
            notes.append(Note("load", "refused", text))


def describe_engine(case: Case, scheduler: Scheduler) -> documents.SimulateEngine:
    """The `engine` part of the document."""
    workload, rules, pool = case.workload, scheduler.rules, scheduler.pool
    return {
        "name": case.engine.name,
        "version": case.engine.version,
        **workload.layout.describe(),
        "kv_dtype": workload.kv_dtype.name,
        "scheduler": cast(Any, rules.schedule.name),
        "step_tokens": rules.step_tokens,
        "max_running_requests": rules.max_running,
        "tokens_per_step": float(rules.tokens_per_step),
        "blocks": pool.capacity,
        "block_tokens": None if pool.capacity is None else pool.block_tokens,
    }


def describe_load(load: Load, requests: Sequence[Request], refused: int) -> documents.SimulateLoad:
    """The `load` part of the document: as it was asked for, and the means of the requests."""
    return {
        "arrivals": cast(Any, load.kind),
        "requests_per_second": load.requests_per_second,
        "burstiness": load.burstiness if load.requests_per_second is not None else None,
        "concurrency": load.concurrency,
        "trace": load.trace_name,
        "scale_rate": load.scale_rate if load.trace is not None else None,
        "seed": None if load.trace is not None else load.seed,
        "is_cold": load.is_cold,
        "is_benchmark": load.is_benchmark,
        "distinct_prompts": load.distinct_prompts,
        "router": cast(Any, load.router),
        "requests": len(requests),
        "refused_requests": refused,
        "prompt_tokens": None if load.prompt is None else load.prompt.text,
        "answer_tokens": None if load.answer is None else load.answer.text,
        "mean_prompt_tokens": sum(request.prompt_tokens for request in requests) / len(requests),
        "mean_answer_tokens": sum(request.answer_tokens for request in requests) / len(requests),
    }


def describe_range(speed: Speed, batch: float) -> documents.SimulateStepRange:
    """The 80 % range of a decode step at the mean batch, as factors on its time. None if it is not known."""
    factors = range_factors(speed.model, speed.regime.ranges, speed.weight_dtype, max(1.0, batch), False)
    low, high = known_range(*factors)
    return {"low_factor": low, "high_factor": high}
