"""Turns a run of a benchmark into the question whose answer predicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.errors import ModelError, UsageError
from kvcalc.model.layout import LayoutAsked
from kvcalc.model.resolve import find_published
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.answers.load import at_load
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.records import NamedTuple
from kvcalc.releases import split_engine
from kvcalc.server.case import Case, make_case
from kvcalc.server.layout import count_replicas
from kvcalc.throughput.bench_results import Measured, Point
from kvcalc.throughput.hardware import Devices, find_devices

if TYPE_CHECKING:
    from kvcalc.question.question import Calibrates

_SERVED = ("tpot", "ttft")


class Given(NamedTuple):
    """What the user says about the runs. It overrides the files; None means that the files say it, or a default."""

    model: ModelSpec | None = None
    devices: Devices | None = None
    engine: str | None = None
    engine_settings: Mapping[str, Any] | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    layout: LayoutAsked = LayoutAsked()
    calibration: Calibrates | None = None
    prefix_hit_rate: float | None = None


def case_of_run(point: Point, given: Given) -> Case:
    """The case that predicts a run, with the number of requests that run at once as its batch.

    Raises UsageError (exit 2), ModelError or GpuError (exit 3) if neither the file nor the user says what it needs, or
    if kvcalc does not predict such runs.
    """
    if point.refusal is not None:
        raise UsageError(point.refusal)
    case = make_case(_question(point, given))
    if count_replicas(case.devices.num_devices, case.layout) > 1:
        needed = case.layout.num_devices
        raise UsageError(
            f"{case.devices.num_devices} devices hold several replicas, and a result is compared with one",
            f"use --num-gpus {needed}, or another --tp",
        )
    return at_load(case)


def compared_seconds(time: Measured) -> float:
    """The measured figure that a prediction is compared with.

    TPOT is compared at the mean, which the tokens per second follow from. TTFT is compared at the median, because the
    first requests of a benchmark arrive together and raise the mean.
    """
    figures = (time.mean_seconds, time.median_seconds)
    return next(seconds for seconds in (figures[::-1] if time.metric == "ttft" else figures) if seconds is not None)


def predicted_seconds(throughput: Mapping[str, Any], metric: str) -> float:
    """The prediction of a metric in the `throughput` part of a document."""
    if metric in _SERVED:
        throughput = throughput["serving"]
    seconds: float = throughput["decode_step_seconds" if metric == "decode" else f"{metric}_seconds"]
    return seconds


def engine_of(point: Point, engine: str | None) -> str:
    """The engine of a run: `engine`, else the server's as the file states it, else the one that its client suggests.

    It has the release that the file states, unless `engine` is another one or has a release.
    """
    if engine is None:
        engine = point.engine or point.likely_engine
    if engine is None:
        raise UsageError(f"a result of {point.tool} does not name the engine", "name it: --engine vllm")
    if engine != point.engine or point.release is None:
        return engine
    stated = f"{engine}@{point.release}"
    try:
        split_engine(stated)
    except UsageError:  # a build of one's own, whose place in the engine's history is not known
        return engine
    return stated


def other_servers(points: Sequence[Point], file: str, engine: str | None) -> list[Note]:
    """A note if the server of runs was another engine than the one that is asked about, or another release of it."""
    if engine is None:
        return []
    name, is_named, _ = engine.partition("@")
    servers = {
        measured_on.engine
        if measured_on.engine != name or measured_on.release is None
        else f"{measured_on.engine}@{measured_on.release}"
        for measured_on in points
        if measured_on.engine is not None
        and (measured_on.engine != name or (is_named and measured_on.release is not None))
    }
    others = sorted(servers - {engine})
    if not others:
        return []
    return [Note("result", "other-engine", f"{file}: measured with {' and '.join(others)}, compared with {engine}")]


def published_model(point: Point) -> ModelSpec | None:
    """The model with one of the names in the file. None if none is known. A path in a file is never opened."""
    for name in point.models:
        # A server may have been started with a path, whose last part is usually the model's name.
        for candidate in dict.fromkeys((name, name.rstrip("/").rpartition("/")[2])):
            spec = find_published(candidate) if candidate else None
            if spec is not None:
                return spec
    return None


def _question(point: Point, given: Given) -> Question:
    """The estimate that predicts a run. Raises KvcalcError if neither the file nor the user says what it needs."""
    engine = engine_of(point, given.engine)
    spec = given.model or _model_of(point)
    if point.layers_on_device is not None and point.layers_on_device < spec.num_layers:
        raise UsageError(
            f"{point.layers_on_device} of {spec.num_layers} layers were on the device (-ngl), "
            "and kvcalc predicts all of them"
        )
    dtype = point.dtype if given.dtype is None else given.dtype
    if dtype is None and point.unknown_dtype is not None:
        raise UsageError(f"the type of its weights is not known: {point.unknown_dtype[:80]!a}", "give it with --dtype")
    settings = dict(given.engine_settings or {})
    if given.kv_dtype is None and engine.partition("@")[0] == point.engine:
        settings = {**point.settings, **settings}
    speed = SpeedQuestion(calibration=given.calibration, benchmark=True, prefix_hit_rate=given.prefix_hit_rate or 0.0)
    context = None
    if any(time.metric in _SERVED for time in point.times):
        speed = speed._replace(
            input_tokens=point.input_tokens, output_tokens=point.output_tokens, concurrency=point.concurrency
        )
    else:
        # A step is predicted at the mean of the contexts it was measured at.
        context = max(1, (point.input_tokens or 0) + -(-(point.output_tokens or 0) // 2))
    return Question(
        spec, context, 1, dtype, "auto" if given.kv_dtype is None else given.kv_dtype, engine, settings,
        devices=given.devices or _devices_of(point), speed=speed,
    ).with_layout(given.layout.over(point.layout))  # fmt: skip


def _devices_of(point: Point) -> Devices:
    if point.gpu is None:
        raise UsageError(f"a result of {point.tool} does not name the device", "name it: --gpu h100, --gpu h100x4")
    return find_devices(point.gpu)._replace(num_devices=point.num_devices or 1)


def _model_of(point: Point) -> ModelSpec:
    published = published_model(point)
    if published is not None:
        return published
    hint = "name it: --model PRESET (kvcalc models), or --model PATH of its config.json"
    if not point.models:
        raise UsageError(f"a result of {point.tool} does not name the model", hint)
    raise ModelError(f"the file names an unknown model, {point.models[0][:80]!a}", hint)
