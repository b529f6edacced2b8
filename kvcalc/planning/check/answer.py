"""The document of `kvcalc check`: whether a server starts, its memory, and the load that it sustains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class
from kvcalc.engines.reading import Read, Reader
from kvcalc.errors import CacheTypeError, DoesNotFitError, LayoutError, ModelError, UsageError
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.estimate import answer
from kvcalc.planning.answers.fit import fit, is_refused
from kvcalc.planning.answers.server_part import describe_refusal
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import Server
from kvcalc.planning.plan.judge import STATISTICS, Judged
from kvcalc.planning.plan.targets import METRICS, Simulates, Targets
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.releases import release_of
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.admission import serves_nothing
from kvcalc.throughput.hardware import Devices
from kvcalc.units import format_size

if TYPE_CHECKING:
    import kvcalc.documents as documents

_LARGER_CACHE = "bf16"
# The precision of the rate, and the requests of a run. As in a plan, the last run has this many seconds of load.
_CLOSE = 0.02
_REQUESTS, _LONG_SECONDS, _MOST_REQUESTS = 1_000, 1_200, 20_000
# A rate that fails in the long run is lowered by this share, at most this many times.
_LOWER, _TRIES = 0.05, 12


def check(
    server: Server, devices: Devices, *, input_tokens: int | None = None, output_tokens: int | None = None,
    targets: Targets | None = None, simulation: Simulates | None = None, speed: SpeedQuestion | None = None,
    acceptance_length: float | None = None, weights_bytes: int | None = None, least_rate: float | None = None,
) -> documents.Check:  # fmt: skip
    """The check document of one server on `devices`. With a `simulation` and lengths, it has the largest rate.

    With `least_rate`, a server that does not sustain this rate has no `capacity`.

    Raises UsageError (exit 2) for what cannot be read, ModelError (exit 3) for a model that is not known, and
    DoesNotFitError (exit 4) with a `CheckRefusal` as its document if the engine refuses to start.
    """
    read = None
    try:
        with _refusals(server.reader):
            read = server.read()
        return _checked(
            server, read, devices, input_tokens, output_tokens, targets, simulation, speed, acceptance_length,
            weights_bytes, least_rate,
        )  # fmt: skip
    except DoesNotFitError as error:
        error.document = {
            "schema_version": SCHEMA_VERSION,
            "command": _command(server, read),
            **describe_refusal(error),
            "requests": None,
            "capacity": None,
            "advice": None,
            "warnings": [],
        }
        raise


def _checked(
    server: Server, read: Read, devices: Devices, input_tokens: int | None, output_tokens: int | None,
    targets: Targets | None, simulation: Simulates | None, speed: SpeedQuestion | None,
    acceptance_length: float | None, weights_bytes: int | None, least_rate: float | None,
) -> documents.Check:  # fmt: skip
    """The document of a server whose options the engine accepts."""
    has_lengths = input_tokens is not None and output_tokens is not None
    # The memory does not depend on the tokens that are accepted.
    accepted = acceptance_length if has_lengths or acceptance_length is not None else 1.0
    with _refusals(server.reader):
        question, notes = asked_by(read, server.reader, devices, speed, accepted, server.num_devices)
    question = question._replace(weights_bytes=weights_bytes)
    try:
        try:
            found = _fit(question, server.reader, read.lifts_limit)
        except CacheTypeError as error:
            # A server that holds the larger cache holds the smaller one too.
            question = question._replace(kv_dtype=_LARGER_CACHE)
            found = _fit(question, server.reader, read.lifts_limit)
            notes.append(Note("command", "command", f"{error.message}: its cache is counted in {_LARGER_CACHE}"))
    except (ModelError, UsageError) as error:
        # The drafter may be unknown. Then the server is answered without it.
        if question.speculative is None:
            raise
        question = question._replace(speculative=None)
        found = _fit(question, server.reader, read.lifts_limit)
        notes.append(Note("command", "command", f"drafting is not counted: {error.message}"))
    if read.margin_bytes is not None and found["fit"]["free_bytes"] < read.margin_bytes:
        question, found = _with_parts_on_host(question, found, server.reader, read.margin_bytes, notes)
    if found["speculative"] is not None and acceptance_length is None:
        found["speculative"]["acceptance_length"] = None
    verdict: Any = found["server"]
    smaller = next((option for option in read.unknown if option.startswith("quantization ")), None)
    if verdict["starts"] is False and smaller is not None:
        verdict["reason"] += (
            f", unless --{smaller} makes the weights small enough, which is not counted (--weights-memory SIZE)"
        )
    capacity = requests = None
    if runs(found) and input_tokens is not None and output_tokens is not None:
        context = found["workload"]["context_tokens"]
        question = _serving(question, input_tokens + output_tokens, context)
        requests = _requests(question, input_tokens, output_tokens, context)
        alone = serves_nothing(engine_class(question.engine).role_in(question.engine_settings or {}))
        notes += [alone] if alone is not None else []
        if simulation is not None and requests["refused"] is None and alone is None:
            limits = targets or Targets(None, None)
            capacity = capacity_of(question, input_tokens, output_tokens, limits, simulation, notes, least_rate)
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": _command(server, read),
        "starts": verdict["starts"],
        "reason": verdict["reason"],
        "requests": requests,
        "capacity": capacity,
        "advice": None,
        **found,
    }
    others = [warning for warning in found["warnings"] if warning["code"] != "start-limit"]
    return cast("documents.Check", {**document, "warnings": [*describe_notes(notes), *others]})


def runs(document: Any, strict: bool = False) -> bool:
    """Whether the server of a check starts by the estimate, or with `strict` in the whole range of its free memory."""
    return not is_refused(document, has_workload=False, strict=strict)


def _command(server: Server, read: Read | None) -> documents.ServerCommand:
    """The `command` part. `read` is None if the engine refuses the options before they are all read."""
    return {
        "service": server.name,
        "engine": server.reader.engine if read is None else read.engine,
        "model": None if read is None else read.model,
        "copies": 1 if read is None else read.copies,
        "ignored": [] if read is None else list(dict.fromkeys(read.ignored)),
        "not_counted": [] if read is None else server.reader.described(read.unknown),
    }


def _fit(question: Question, reader: Reader, lifts_limit: bool = False) -> documents.FitDocument:
    with _refusals(reader):
        return fit(question, lifts_limit)


def _with_parts_on_host(
    question: Question, document: documents.FitDocument, reader: Reader, margin: int, notes: list[Note]
) -> tuple[Question, documents.FitDocument]:
    """The server with the parts in host memory that it moves there itself, until the device has `margin` bytes free.

    Experts are moved before whole layers. The question and its answer are the given ones if that is not known.
    """
    devices, engine, release = question.devices, engine_class(question.engine), release_of(question.engine)
    try:
        engine.check_auto_context(question.engine_settings or {}, release)
    except UsageError:  # an older build
        return question, document
    if devices is None or devices.num_devices > 1:
        return question, document
    gpu = devices.gpu._replace(memory_bytes=devices.gpu.memory_bytes - margin)
    tokens = document["workload"]["context_tokens"]
    placed = question._replace(context_tokens=tokens, fits_context=False)
    offload = _fit(placed._replace(devices=devices._replace(gpu=gpu)), reader)["offload"]
    moved, options = offload and (offload["n_cpu_moe"] or offload["n_gpu_layers"]), engine.placement_options
    if not offload or moved is None or options is None:
        return question, document
    option = options.experts if moved is offload["n_cpu_moe"] else options.layers
    settings = {**(question.engine_settings or {}), option: str(moved["value"])}
    text = f"the server leaves {format_size(margin)} of the device free: it starts as with --{option} {moved['value']}"
    notes.append(Note("command", "placed", text))
    placed = placed._replace(engine_settings=settings)
    return placed, _fit(placed, reader)


@contextmanager
def _refusals(reader: Reader) -> Iterator[None]:
    """What the engine refuses is an answer: the server does not start. Options have the engine's names."""
    try:
        yield
    except (DoesNotFitError, LayoutError) as error:
        told = error.message if " not start" in error.message else f"does not start: {error.message}"
        raise DoesNotFitError(reader.reworded(told), error.hint and reader.reworded(error.hint)) from None


def _serving(question: Question, tokens: int, context: int) -> Question:
    """The question about the server that has started, with a context of `context` tokens, and requests of `tokens`."""
    release = release_of(question.engine)
    engine = engine_class(question.engine).at(question.model.model_type, release)
    limited = engine.limit_running(question.engine_settings or {}, context, tokens, release)
    return question._replace(engine_settings=limited, context_tokens=context, fits_context=False)


def _requests(question: Question, input_tokens: int, output_tokens: int, context: int) -> documents.CheckRequests:
    """What a server with a context of `context` tokens does with requests of these lengths."""
    tokens, refused = input_tokens + output_tokens, _refused(question, input_tokens, output_tokens, context)
    speed = None if question.speed is None else question.speed._replace(input_tokens=None, output_tokens=None)
    held = question._replace(context_tokens=tokens, fits_context=False, batch_size=1, speed=speed)
    most = 0 if refused else answer(held).fit["max_batch_size"]
    in_memory, settings = most, dict(question.engine_settings or {})
    if not refused and settings.pop(engine_class(question.engine).running_option or "", None) is not None:
        in_memory = answer(held._replace(engine_settings=settings)).fit["max_batch_size"]
    return {
        "input_tokens": input_tokens, "output_tokens": output_tokens, "max_requests": most,
        "memory_requests": in_memory, "refused": refused,
    }  # fmt: skip


def _refused(question: Question, input_tokens: int, output_tokens: int, context: int) -> str | None:
    """Why a server that starts refuses requests of these lengths, or cuts their answers. None if it serves them."""
    engine = engine_class(question.engine)
    needed = engine.needed_context(input_tokens, output_tokens)
    if needed > context:
        return f"they need a context of {needed:,} tokens, and the server's has {context:,}"
    try:
        engine.prompt_settings(question.engine_settings or {}, input_tokens, True)
    except LayoutError as error:
        return f"{error.message}; {error.hint}"
    return None


def capacity_of(
    question: Question,
    input_tokens: int,
    output_tokens: int,
    targets: Targets,
    simulation: Simulates,
    notes: list[Note],
    least_rate: float | None = None,
) -> documents.SustainedRate | None:
    """The `capacity` part of the document: the largest rate, and the times there. None, with a note, if not known.

    None also if the server does not sustain `least_rate`.

    A rate is kept if the targets are met and the queue does not grow without bound, with steps as slow as they are
    judged (`planning.plan.judge`).
    """
    # The short form says where to begin.
    speed = question.speed_asked._replace(
        input_tokens=input_tokens, output_tokens=output_tokens, concurrency=None, short_form=True
    )
    held = question._replace(speed=speed, context_tokens=None, fits_context=False, batch_size=1)
    document = answer(held).document
    throughput = document["throughput"]
    serving = None if throughput is None else throughput["serving"]
    if serving is None:
        notes += [Note(**warning) for warning in document["warnings"] if warning["part"] == "throughput"]
        return None
    most = max(serving["requests_per_second"] * 1.25, (least_rate or 0.0) * 1.25)
    served = question._replace(speed=question.speed_asked._replace(input_tokens=None, output_tokens=None))
    step = serving["tpot_judged_seconds"] / serving["tpot_seconds"]
    ttft = serving["ttft_judged_seconds"] / serving["ttft_seconds"]

    def judged(rate: float, requests: int, more: int = 0) -> Judged:
        targets_at_rate = targets._replace(requests_per_second=rate)
        simulated = simulation.seeded(more).run(served, targets_at_rate, 1, requests, step)
        return Judged.at(simulated, step, ttft).against(targets_at_rate, is_alone=False)

    if least_rate is not None and judged(least_rate, _REQUESTS).missed is not None:
        return None
    alone = Judged.at(simulation.run(served, targets, None, 1, step), step, ttft).against(targets, is_alone=True)
    if alone.missed is not None:
        return _described(0.0, alone, speed.confidence)
    low, high, limit = 0.0, most, None
    while high - low > _CLOSE * high:
        rate = (low + high) / 2
        tried = judged(rate, _REQUESTS)
        if tried.missed is not None:
            high, limit = rate, tried.missed
        elif limit is None and most - rate <= _CLOSE * most:
            # The short form said too little.
            low, high, most = rate, 2 * most, 2 * most
        else:
            low = rate
        if high < most * 1e-4:
            return _described(0.0, tried, speed.confidence)
    for _ in range(_TRIES):
        tried = judged(low, int(min(max(low * _LONG_SECONDS, _REQUESTS), _MOST_REQUESTS)), 1)
        if tried.missed is None:
            break
        low, limit = low * (1 - _LOWER), tried.missed
    else:
        return _described(0.0, tried, speed.confidence)
    return {**_described(low, tried, speed.confidence), "limited_by": limit}


def _described(rate: float, judged: Judged, confidence: int) -> documents.SustainedRate:
    times = {
        f"{metric}_{statistic}_seconds": judged.seconds(metric, statistic)
        for metric in METRICS
        for statistic in STATISTICS
    }
    described = {
        "requests_per_second": rate,
        "confidence": confidence,
        "limited_by": judged.missed,
        "step_factor": judged.step_factor,
        "ttft_factor": judged.ttft_factor,
        "simulated_requests": judged.simulated.requests,
        "max_running_requests": judged.simulated.most_running,
    }
    return cast("documents.SustainedRate", {**described, **times})
