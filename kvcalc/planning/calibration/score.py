"""Compares measured with predicted times: the error, and the part of the prediction that causes it.

With at least three runs of one setup, the factors that fit them show the cause (`factor_fit`). With fewer, the largest
part of each prediction is the first place to look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.estimate import answer_case
from kvcalc.planning.calibration import Calibration
from kvcalc.planning.calibration.attention_rows import attention_rows
from kvcalc.planning.calibration.fitted_runs import Observed, Run, describe_fit, mean_error, observe
from kvcalc.planning.calibration.measured import Given, case_of_run, compared_seconds, other_servers, predicted_seconds
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.bench_results import MAX_RESULT_BYTES, Measured, read_results
from kvcalc.throughput.calibrate import is_record
from kvcalc.throughput.factor_fit import LEAST_RUNS, fit
from kvcalc.throughput.factors import Factors
from kvcalc.throughput.roofline import Step

if TYPE_CHECKING:
    import kvcalc.documents as documents

__all__ = ["MAX_RESULT_BYTES", "score"]

# Notes of an estimate that are about its speed or its model. The others are about memory.
_PARTS = ("model", "throughput", "calibration")
# First tokens after less than this share of the predicted time suggest that the engine found the prompts in its cache.
_EARLY = 0.5
# A prediction is called close if it is off by at most this share.
_QUARTER = 0.25
# What the runs of one setup have in common.
_SETUP = (
    "model", "engine", "gpu", "num_devices", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
)  # fmt: skip


class Predicted(NamedTuple):
    """A predicted time with its range, in seconds, and its parts, which add up to it."""

    seconds: float
    low_seconds: float | None
    high_seconds: float | None
    parts: dict[str, float]


class Scored(NamedTuple):
    """The rows of a run, its times for a fit, and the `calibration` part of its prediction."""

    rows: list[documents.ScoreRow]
    observed: list[Observed]
    calibration: documents.Calibration | None


def score(
    files: Sequence[tuple[str, str]], given: Given = Given(), progress: Callable[[int], None] | None = None
) -> documents.Score:
    """The score document of benchmark results and records of `kvcalc measure`, as pairs of a file's name and its text.

    Runs that cannot be compared are in `refused`. If that is all of them, the first one's error is raised: UsageError
    (exit 2), ModelError or GpuError (exit 3). `progress` is called with the number of runs that are done.
    """
    scored: list[Scored] = []
    notes: list[Note] = []
    results: list[documents.ScoreResultsItem] = []
    refused: list[documents.ScoreRefusedItem] = []
    first: KvcalcError | None = None
    of_records: list[documents.ScoreRow] = []
    for name, text in files:
        record = _record_in(text)
        if record is not None:
            group = attention_rows(record, name, given)
            if not group:
                raise UsageError(f"{name}: the record has no runs with attention")
            results.append({"file": name, "tool": "kvcalc-measure", "runs": len(group)})
            of_records += group
            continue
        points = read_results(text, name)
        results.append({"file": name, "tool": cast(Any, points[0].tool), "runs": len(points)})
        for point in points:
            if progress is not None:
                progress(len(scored) + len(refused))
            try:
                scored.append(_score_run(Run(name, point), len(scored), given, notes))
            except KvcalcError as error:
                refused.append({"file": name, "run": point.run, "reason": error.message, "hint": error.hint})
                first = first or type(error)(f"{name}, run {point.run}: {error.message}", error.hint)
        notes += other_servers(points, name, given.engine)
    rows = [row for run in scored for row in run.rows] + of_records
    if not rows:
        raise first or UsageError("no results to compare", "kvcalc score FILE...")
    shares = [row["measured_seconds"] / row["predicted_seconds"] for row in rows if row["metric"] == "ttft"]
    if given.prefix_hit_rate is None and shares and median(shares) < _EARLY:
        text = "first tokens come early: if the client repeated prompts, say which share with --prefix-hit-rate 0.9"
        notes.append(Note("result", "repeated-prompts", text))
    notes += [Note("result", "refused", f"{r['file']}, run {r['run']}: {r['reason']}") for r in refused]
    return {
        "schema_version": SCHEMA_VERSION,
        "results": results,
        "scores": rows,
        "summary": [_summary(group) for group in _grouped(rows, ("metric",))],
        "setups": _setups(scored),
        "refused": refused,
        "warnings": describe_notes(notes),
    }


def _record_in(text: str) -> dict[str, Any] | None:
    """The record of `kvcalc measure` in a file, if it is one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if is_record(document) else None


def _score_run(run: Run, number: int, given: Given, notes: list[Note]) -> Scored:
    """The rows of a run, one for every time."""
    point, case = run.point, case_of_run(run.point, given)
    answer = answer_case(case)
    throughput = answer.document["throughput"]
    speed = speed_of(case, [])
    if throughput is None or not isinstance(speed, Speed):
        unknown = next((note.text for note in answer.notes if note.part == "throughput"), "it does not fit in memory")
        raise UsageError(f"no prediction: {unknown}")
    notes += [note for note in answer.notes if note.part in _PARTS]
    observed = observe(run, number, case)
    left_out: dict[tuple[int, str], float] = {}
    if isinstance(given.calibration, Calibration):
        left_out = given.calibration.left_out(case, run.file)
    alike = {
        "file": run.file,
        "run": point.run,
        "tool": point.tool,
        "model": case.model.name,
        "engine": case.question.engine,
        "gpu": case.devices.gpu.name,
        "num_devices": case.devices.num_devices,
        "tensor_parallel_size": case.layout.tensor_parallel_size,
        "pipeline_parallel_size": case.layout.pipeline_parallel_size,
        "data_parallel_size": case.layout.data_parallel_size,
        "input_tokens": point.input_tokens,
        "output_tokens": point.output_tokens,
        "context_tokens": case.workload.context_tokens,
        "concurrency": point.concurrency,
        "concurrency_is_average": point.is_average,
    }
    rows: list[documents.ScoreRow] = []
    for time, seen in zip(point.times, observed):
        before = seen.observation.predict(Factors()) if given.calibration is not None else None
        row = _compared(time, _predicted(time.metric, case, throughput, speed))
        others = {"uncalibrated_seconds": before, "left_out_seconds": left_out.get((point.run, time.metric))}
        rows.append(cast("documents.ScoreRow", {**alike, **row, **others}))
    return Scored(rows, observed, throughput["calibration"])


def _predicted(metric: str, case: Case, throughput: documents.Throughput, speed: Speed) -> Predicted:
    """The prediction of the estimate for one time, and its parts."""
    model, serving = speed.model, cast("documents.Serving", throughput["serving"])
    seconds = predicted_seconds(throughput, metric)
    if metric == "decode":
        step = model.decode(case.workload.batch_size, case.workload.context_tokens)
        return Predicted(seconds, throughput["low_seconds"], throughput["high_seconds"], _parts(step))
    if metric == "prefill":
        step = model.prefill(case.workload.context_tokens, case.workload.batch_size)
        return Predicted(seconds, None, None, _parts(step))
    prompt, answer = serving["input_tokens"], serving["output_tokens"]
    if metric == "ttft":
        lone = min(seconds, model.prefill(prompt).seconds)
        low, high = serving["ttft_low_seconds"], serving["ttft_high_seconds"]
        return Predicted(seconds, low, high, {"prefill": lone, "waiting": seconds - lone})
    step = model.decode(serving["running_requests"], prompt + answer / 2)
    low, high = serving["tpot_low_seconds"], serving["tpot_high_seconds"]
    # Prefills of other requests delay the steps of a request.
    return Predicted(seconds, low, high, {**_parts(step), "prefill": max(0.0, seconds - step.seconds)})


def _parts(step: Step) -> dict[str, float]:
    """The parts of a step by name. The first field of a step is their sum."""
    return dict(list(step._asdict().items())[1:])


def _compared(time: Measured, predicted: Predicted) -> dict[str, Any]:
    """The columns of a row about one time."""
    seconds = compared_seconds(time)
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


def _setups(scored: Iterable[Scored]) -> list[documents.ScoreSetup]:
    """For every setup, the factors that fit its runs (None if there are too few), and its calibration."""
    groups: dict[tuple[Any, ...], list[Scored]] = {}
    for run in scored:
        if run.rows:
            groups.setdefault(tuple(value for key, value in run.rows[0].items() if key in _SETUP), []).append(run)
    setups: list[documents.ScoreSetup] = []
    for setup, runs in groups.items():
        observed = [seen for run in runs for seen in run.observed]
        explained = None
        if len(runs) >= LEAST_RUNS:
            explained = describe_fit(fit([seen.observation for seen in observed]), observed)
        described = {**dict(zip(_SETUP, setup)), "explained": explained, "calibration": runs[0].calibration}
        setups.append(cast("documents.ScoreSetup", described))
    return setups


def _grouped(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _summary(rows: Sequence[Mapping[str, Any]]) -> documents.ScoreSummaryItem:
    errors = [abs(row["error"]) for row in rows]
    ranges = [row["in_range"] for row in rows if row["in_range"] is not None]
    return {
        "metric": rows[0]["metric"],
        "times": len(rows),
        "mean_error": mean(errors),
        "median_error": median(errors),
        "within_a_quarter": mean(float(error <= _QUARTER) for error in errors),
        "in_range": mean(map(float, ranges)) if ranges else None,
        "uncalibrated_mean_error": mean_error(rows, "uncalibrated_seconds"),
        "left_out_mean_error": mean_error(rows, "left_out_seconds"),
    }
