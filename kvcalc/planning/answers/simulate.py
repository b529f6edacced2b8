"""Simulate replicas of an engine that serve requests, and describe what a client sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import UsageError
from kvcalc.model.describe import describe_model
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.gpus import describe_hardware
from kvcalc.planning.answers.throughput import gaps_of
from kvcalc.question.question import Question, setting_texts
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.admission import check_serves
from kvcalc.server.case import Case
from kvcalc.server.layout import context_for, count_replicas
from kvcalc.server.resolve import with_engine
from kvcalc.server.speed import Speed
from kvcalc.simulation.common_prefix import (
    case_of,
    check_reuse,
)
from kvcalc.simulation.fleet import Progress
from kvcalc.simulation.loads.load import Load, Requests, check_load, requests_of
from kvcalc.simulation.play import known_speed, play
from kvcalc.simulation.results import Limits, Outcome, describe_results, describe_timeline, describe_times
from kvcalc.simulation.scheduler import Scheduler, start_notes
from kvcalc.throughput.hardware import Devices
from kvcalc.throughput.speed import Gap, gap_note, known_range, range_factors

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
    assumes: bool = False,
) -> documents.Simulate:
    """The document of `kvcalc simulate`. Without times between tokens and states over time if not `is_detailed`.

    `replicas` are as many as the devices hold if None. The times of all steps are multiplied by `step_factor`. With
    `assumes`, an engine whose scheduler is not known runs requests beside each other. The
    question must have `devices`; of its `speed`, the calibration, --ep and the hit rate are used, and of its `reuse`
    the common prefix. Raises UsageError (exit 2), ModelError (exit 3) if the speed is
    not known, and DoesNotFitError (exit 4) if no request can run.
    """
    question, devices, requests, notes = ask_about(question, load)
    check_serves(question.engine, setting_texts(question.engine_settings or {}))
    if replicas and devices.num_devices % replicas == 0 and question.tensor_parallel_size is None:
        # All devices of a replica without --tp, as of one server.
        question = question._replace(devices=Devices(devices.gpu, devices.num_devices // replicas))
    check_reuse(question)
    case, prefix = case_of(question)
    if case.engine.placement is not None:
        from kvcalc.server.offload import place_layers

        case = place_layers(case)
    notes = [*case.notes, *notes]
    speed = known_speed(case, notes)
    number = replicas or count_replicas(case.devices.num_devices, case.layout)
    _check_devices(devices.num_devices, number, case.layout.num_devices)
    if load.clients is not None and load.clients < number:
        raise UsageError(f"{load.clients} clients are less than {number} replicas", "use fewer --replicas")
    scheduler, outcome = play(
        case, speed.model, requests, load, number, step_factor, notes, progress,
        is_detailed=is_detailed, assumes=assumes, prefix=prefix,
    )  # fmt: skip
    notes += start_notes(case)
    instances = Instances(case, speed, scheduler, number, number * case.layout.num_devices)
    document = describe_outcome(outcome, instances, load, limits, step_factor, notes)
    return cast("documents.Simulate", {**document, "warnings": describe_notes(notes)})


class Instances(NamedTuple):
    """The instances that decode: `number` of a case. Those and all others together have `num_devices` devices."""

    case: Case
    speed: Speed
    scheduler: Scheduler
    number: int
    num_devices: int


def describe_outcome(
    outcome: Outcome, instances: Instances, load: Load, limits: Limits, step_factor: float, notes: list[Note]
) -> dict[str, Any]:
    """The document without its notes. Adds one for what no measurement covers."""
    case, results = instances.case, describe_results(outcome, limits, load)
    batch = max(1.0, results["mean_running_requests"] / instances.number)
    if gaps := gaps_of(case, instances.speed, batch):
        notes.append(gap_note(gaps))
    return {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(case.spec),
        "hardware": {
            **describe_hardware(case), "num_devices": instances.num_devices, "replicas": instances.number
        },
        "engine": describe_engine(case, instances.scheduler),
        "load": describe_load(load, outcome),
        "limits": limits._asdict(),
        "results": results,
        "times": describe_times(outcome),
        "timeline": describe_timeline(outcome.ranks),
        "step_factor": step_factor,
        "step_range": describe_range(instances.speed, batch, gaps),
    }  # fmt: skip


class Asked(NamedTuple):
    """A question for the longest request that its server takes, its devices, the requests, and notes."""

    question: Question
    devices: Devices
    requests: Requests
    notes: list[Note]


def ask_about(question: Question, load: Load) -> Asked:
    """The question of a simulation for the longest request, and the requests of its load.

    The context of the question is that of the longest request, and at most what its server takes. Raises UsageError
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
    finds = "whole prompts are found with --distinct-prompts" if load.distinct_prompts is not None else None
    finds = finds if load.sessions is None else "--sessions say what is found again"
    for is_given, option in (
        (question.reuse is not None and question.reuse.prefix_tokens, "--prefix-tokens"),
        (speed.prefix_hit_rate, "--prefix-hit-rate"),
    ):
        if is_given and finds is not None:
            raise UsageError(f"{option}: {finds}", "leave it out")
    notes: list[Note] = []
    requests = requests_of(load, speed.prefix_hit_rate, notes)
    devices, question = question.devices, with_engine(question)
    longest = question.context_tokens or context_for(question, requests.longest_prompt, requests.longest_tokens)
    return Asked(question._replace(context_tokens=longest, batch_size=1, speed=speed), devices, requests, notes)


def _check_devices(num_devices: int, replicas: int, each: int) -> None:
    """UsageError (exit 2) if the replicas need more than the devices that were asked for. 1 is no number of its own."""
    if num_devices > 1 and replicas * each > num_devices:
        raise UsageError(
            f"--replicas {replicas}: they need {replicas * each} devices, and there are {num_devices}",
            f"use --num-gpus {replicas * each}, or --replicas {max(1, num_devices // each)}",
        )


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


def describe_load(load: Load, outcome: Outcome) -> documents.SimulateLoad:
    """The `load` part of the document: as it was asked for, and the means of the requests."""
    requests = outcome.requests
    return {
        "arrivals": cast(Any, load.kind),
        "requests_per_second": load.requests_per_second,
        "burstiness": load.burstiness if load.requests_per_second is not None else None,
        "concurrency": load.concurrency,
        "users": load.users,
        "think_seconds": load.think_seconds if load.clients is not None else None,
        "session_turns": None if load.sessions is None else load.sessions.turns,
        "session_growth_tokens": None if load.sessions is None else load.sessions.growth_tokens,
        "trace": load.trace_name,
        "scale_rate": load.scale_rate if load.trace is not None else None,
        "seed": None if load.trace is not None else load.seed,
        "is_cold": load.is_cold,
        "is_benchmark": load.is_benchmark,
        "distinct_prompts": load.distinct_prompts,
        "router": cast(Any, load.router),
        "requests": len(requests) + outcome.refused,
        "refused_requests": outcome.refused,
        "prompt_tokens": None if load.prompt is None else load.prompt.text,
        "answer_tokens": None if load.answer is None else load.answer.text,
        "mean_prompt_tokens": sum(request.prompt_tokens for request in requests) / len(requests),
        "mean_answer_tokens": sum(request.answer_tokens for request in requests) / len(requests),
    }


def describe_range(speed: Speed, batch: float, gaps: list[Gap]) -> documents.SimulateStepRange:
    """The 80 % range of a decode step at the mean batch, as factors on its time. None if it is not known."""
    low, high = known_range(*range_factors(speed.model, speed.regime.ranges, speed.weight_dtype, batch, gaps))
    return {"low_factor": low, "high_factor": high}
