"""Sets measured times beside the predicted ones: how far the prediction is off, and which part of it is the largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.model.hf_config import read_config
from kvcalc.model.pasted import find_pasted
from kvcalc.model.presets import find_preset
from kvcalc.model.resolve import spec_of
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.case import Case, Question, make_case
from kvcalc.planning.estimate import answer_case
from kvcalc.planning.layout import SpeedQuestion, count_replicas
from kvcalc.planning.load import at_load
from kvcalc.planning.throughput import Speed, speed_of
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.throughput.bench_results import MAX_RESULT_BYTES, Measured, Point, read_results
from kvcalc.throughput.hardware import Devices, find_devices
from kvcalc.throughput.roofline import Step

if TYPE_CHECKING:
    from kvcalc.throughput.calibrate import Calibration

__all__ = ["MAX_RESULT_BYTES", "Given", "score"]

_SERVED = ("tpot", "ttft")
# Notes of an estimate that are about its speed or its model. The others are about memory.
_PARTS = ("model", "throughput", "calibration")
# A prediction is called close if it is off by at most this share.
_QUARTER = 0.25


class Given(NamedTuple):
    """What the user says about the runs. It overrides the files; None means that the files say it, or a default."""

    model: ModelSpec | None = None
    devices: Devices | None = None
    engine: str | None = None
    engine_settings: Mapping[str, Any] | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    data_parallel_size: int | None = None
    calibration: Calibration | None = None


class Predicted(NamedTuple):
    """A predicted time with its range, in seconds, and its parts, which add up to it."""

    seconds: float
    low_seconds: float | None
    high_seconds: float | None
    parts: dict[str, float]


def score(files: Sequence[tuple[str, str]], given: Given = Given()) -> dict[str, Any]:
    """The score document of benchmark results, as pairs of a file's name and its text.

    Runs that cannot be compared are in `refused`. If that is all of them, the first one's error is raised: UsageError
    (exit 2), ModelError or GpuError (exit 3).
    """
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    results: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    first: KvcalcError | None = None
    for name, text in files:
        points = read_results(text, name)
        results.append({"file": name, "tool": points[0].tool, "runs": len(points)})
        for point in points:
            try:
                rows += _rows(name, point, given, notes)
            except KvcalcError as error:
                refused.append({"file": name, "run": point.run, "reason": error.message, "hint": error.hint})
                first = first or type(error)(f"{name}, run {point.run}: {error.message}", error.hint)
    if not rows:
        raise first or UsageError("no results to compare", "kvcalc score FILE...")
    notes += [Note("result", "refused", f"{r['file']}, run {r['run']}: {r['reason']}") for r in refused]
    return {
        "schema_version": SCHEMA_VERSION,
        "results": results,
        "scores": rows,
        "summary": [_summary(metric, found) for metric, found in _by_metric(rows).items()],
        "refused": refused,
        "warnings": describe_notes(notes),
    }


def _rows(name: str, point: Point, given: Given, notes: list[Note]) -> list[dict[str, Any]]:
    """One row for every time of a run."""
    if point.refusal is not None:
        raise UsageError(point.refusal)
    question = _question(point, given, notes)
    case = make_case(question)
    if count_replicas(case.devices.num_devices, case.workload) > 1:
        needed = case.workload.num_devices
        raise UsageError(
            f"{case.devices.num_devices} devices hold several replicas, and a result is compared with one",
            f"use --num-gpus {needed}, or another --tp",
        )
    case = at_load(case)
    answer = answer_case(case)
    throughput = answer.document["throughput"]
    speed = speed_of(case, [])
    if throughput is None or not isinstance(speed, Speed):
        unknown = next((note.text for note in answer.notes if note.part == "throughput"), "it does not fit in memory")
        raise UsageError(f"no prediction: {unknown}")
    notes += [note for note in answer.notes if note.part in _PARTS]
    alike = {
        "file": name,
        "run": point.run,
        "tool": point.tool,
        "model": case.model.name,
        "engine": question.engine,
        "gpu": case.devices.gpu.name,
        "num_devices": case.devices.num_devices,
        "tensor_parallel_size": case.workload.tensor_parallel_size,
        "pipeline_parallel_size": case.workload.pipeline_parallel_size,
        "data_parallel_size": case.workload.data_parallel_size,
        "input_tokens": point.input_tokens,
        "output_tokens": point.output_tokens,
        "context_tokens": case.workload.context_tokens,
        "concurrency": point.concurrency,
        "concurrency_is_average": point.is_average,
    }
    return [
        {**alike, **_compared(time, _predicted(time.metric, point, case, throughput, speed))} for time in point.times
    ]


def _question(point: Point, given: Given, notes: list[Note]) -> Question:
    """The estimate that predicts a run. Raises KvcalcError if neither the file nor the user says what it needs."""
    engine = point.engine if given.engine is None else given.engine
    if engine is None:
        raise UsageError(f"a result of {point.tool} does not name the engine", "name it: --engine vllm")
    spec = given.model or _model_of(point, notes)
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
    asked = SpeedQuestion(given.expert_parallel_size or point.expert_parallel_size, calibration=given.calibration)
    context = None
    if _is_served(point):
        asked = asked._replace(
            input_tokens=point.input_tokens, output_tokens=point.output_tokens, concurrency=point.concurrency
        )
    else:
        # A step is predicted at the mean of the contexts it was measured at.
        context = max(1, (point.input_tokens or 0) + -(-(point.output_tokens or 0) // 2))
    return Question(
        spec, context, 1, dtype, "auto" if given.kv_dtype is None else given.kv_dtype, engine, settings,
        given.tensor_parallel_size or point.tensor_parallel_size,
        given.pipeline_parallel_size or point.pipeline_parallel_size or 1,
        devices=given.devices or _devices_of(point), speed=asked,
        data_parallel_size=given.data_parallel_size or point.data_parallel_size or 1,
    )  # fmt: skip


def _is_served(point: Point) -> bool:
    return any(time.metric in _SERVED for time in point.times)


def _devices_of(point: Point) -> Devices:
    if point.gpu is None:
        raise UsageError(f"a result of {point.tool} does not name the device", "name it: --gpu h100, --gpu h100x4")
    return find_devices(point.gpu)._replace(num_devices=point.num_devices or 1)


def _model_of(point: Point, notes: list[Note]) -> ModelSpec:
    """The preset with one of the names in the file. A path in a file is never opened."""
    for name in point.models:
        # A server may have been started with a path, whose last part is usually the model's name.
        for candidate in dict.fromkeys((name, name.rstrip("/").rpartition("/")[2])):
            preset = find_preset(candidate) if candidate else None
            if preset is not None:
                return spec_of(preset)
            pasted = find_pasted(candidate) if candidate else None
            if pasted is not None:
                notes.append(Note("model", "remark", pasted.remark))
                return read_config(pasted.config, pasted.name, pasted.preset.source)
    hint = "name it: --model PRESET (kvcalc models), or --model PATH of its config.json"
    if not point.models:
        raise UsageError(f"a result of {point.tool} does not name the model", hint)
    raise ModelError(f"the file names an unknown model, {point.models[0][:80]!a}", hint)


def _predicted(metric: str, point: Point, case: Case, throughput: Mapping[str, Any], speed: Speed) -> Predicted:
    """The prediction of the estimate for one time, and its parts."""
    model, serving = speed.model, throughput["serving"]
    if metric == "decode":
        parts = {name.removesuffix("_seconds"): seconds for name, seconds in throughput["parts"].items()}
        low, high = throughput["low_seconds"], throughput["high_seconds"]
        return Predicted(throughput["decode_step_seconds"], low, high, parts)
    if metric == "prefill":
        step = model.prefill(case.workload.context_tokens, case.workload.batch_size)
        return Predicted(throughput["prefill_seconds"], None, None, _parts(step))
    seconds = serving[f"{metric}_seconds"]
    low, high = serving[f"{metric}_low_seconds"], serving[f"{metric}_high_seconds"]
    prompt, answer = serving["input_tokens"], serving["output_tokens"]
    if metric == "ttft":
        lone = min(seconds, model.prefill(prompt).seconds)
        return Predicted(seconds, low, high, {"prefill": lone, "waiting": seconds - lone})
    step = model.decode(serving["running_requests"], prompt + answer / 2)
    # Prefills of other requests delay the steps of a request.
    return Predicted(seconds, low, high, {**_parts(step), "prefill": max(0.0, seconds - step.seconds)})


def _parts(step: Step) -> dict[str, float]:
    """The parts of a step by name. The first field of a step is their sum."""
    return dict(list(step._asdict().items())[1:])


def _compared(time: Measured, predicted: Predicted) -> dict[str, Any]:
    """The columns of a row about one time.

    TPOT is compared at the mean, which the tokens per second follow from. TTFT is compared at the median, because the
    first requests of a benchmark arrive together and raise the mean.
    """
    figures = (time.mean_seconds, time.median_seconds)
    seconds = next(f for f in (figures[::-1] if time.metric == "ttft" else figures) if f is not None)
    low, high = predicted.low_seconds, predicted.high_seconds
    part = max(predicted.parts, key=lambda name: predicted.parts[name])
    largest = predicted.parts[part]
    factor = (largest + seconds - predicted.seconds) / largest if largest else 0.0
    return {
        "metric": time.metric,
        "measured_seconds": seconds,
        "mean_seconds": time.mean_seconds,
        "median_seconds": time.median_seconds,
        "predicted_seconds": predicted.seconds,
        "low_seconds": low,
        "high_seconds": high,
        "error": predicted.seconds / seconds - 1,
        "in_range": None if low is None or high is None else low <= seconds <= high,
        "largest_part": part,
        "largest_part_seconds": largest,
        "largest_part_factor": factor if factor > 0 else None,
    }


def _by_metric(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["metric"], []).append(row)
    return found


def _summary(metric: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    ranges = [row["in_range"] for row in rows if row["in_range"] is not None]
    return {
        "metric": metric,
        "times": len(rows),
        "mean_error": mean(errors),
        "median_error": median(errors),
        "within_a_quarter": mean(float(error <= _QUARTER) for error in errors),
        "in_range": mean(map(float, ranges)) if ranges else None,
    }
