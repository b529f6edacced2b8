"""`--calibrate`: records of `kvcalc measure`, and the results of benchmarks, change the constants of the speed.

Results carry over as far as they say something about the question. The runs nearest to it are used:
    the same model and type of weights      all factors that they determine, and a smaller range
    another model, then another type        the factors `OF_ENGINE`; the range stays
    another engine or device                nothing, and a note says so; records alone are refused
What a file does not name (the device, often the engine and the split) is taken to be as in the question. The client of
a benchmark does not name the engine: every client measures every server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.model.files import check_path, list_folder, read_text
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.calibration.fitted_runs import (
    Observed,
    Run,
    describe_fit,
    observe,
    with_factors,
    without_calibration,
)
from kvcalc.planning.calibration.measured import Given, case_of_run, published_model
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.applied import Applied
from kvcalc.throughput.bench_results import KNOWN_RESULTS, MAX_RESULT_BYTES, Point, read_results
from kvcalc.throughput.calibrate import Measured, Record, Records, combine, is_record, read_record
from kvcalc.throughput.factor_fit import Fit, fit, neighbours
from kvcalc.throughput.factors import OF_ENGINE
from kvcalc.throughput.hardware import Devices, find_devices

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Times of other models count with this many times the spread. With less, the error of the prediction for one model is
# taken for that of the engine, and other models are predicted worse (benchmarks/score/calibrate.py --carry).
_BETWEEN_MODELS = 4.5
_MOST_RUNS = 300
_ENDINGS = (".json", ".jsonl")


class Calibration:
    """What the files of `--calibrate` say. Two calibrations are the same only if they are the same object."""

    def __init__(self, records: Sequence[Record], runs: Sequence[Run], notes: Sequence[Note] = ()) -> None:
        self.records, self.runs, self._notes = tuple(records), tuple(runs), tuple(notes)

    def apply(self, case: Case, speed: Speed) -> Speed:
        """The speed of `case` with the constants that the files determine, and how they changed it.

        UsageError (exit 2) if there are only records, of other devices.
        """
        found_records = combine(self.records, case.devices.gpu)
        if self.records and not self.runs and not found_records.number:
            raise self.records[0].refusal(case.devices.gpu)
        notes, base = [*self._notes, *found_records.notes], _with_record(speed, found_records.record)
        nearness, observed = self._nearest(case, speed, found_records.record, notes)
        if not observed:
            applied = "record" if found_records.number else "none"
            return base._replace(calibration=Applied(_describe(found_records, applied, None, ()), tuple(notes)))
        is_own = nearness == 0
        times = [seen.observation for seen in observed]
        fitted = fit(times) if is_own else fit(times, _BETWEEN_MODELS).only(OF_ENGINE, times)
        factors = fitted.factors
        if not is_own:
            what = "another model" if nearness == 1 else "another type of weights"
            those = f"{', '.join(OF_ENGINE[:-1])} and {OF_ENGINE[-1]}"
            text = f"--calibrate: the runs are of {what}; only {those} carry over, and the range stays"
            notes.append(Note("calibration", "other-model", text))
        document = _describe(found_records, "all" if is_own else "partly", fitted, observed)
        near = [with_factors(base, near).model for near in neighbours(factors)] if is_own else ()
        mark = Applied(document, tuple(notes), fitted if is_own else None, tuple(near))
        return with_factors(base, factors)._replace(calibration=mark)

    def first_without(self, name: str) -> str | None:
        """The first file with a run that does not name its `device` or `engine`. None if all of them do."""
        key = "gpu" if name == "device" else name
        return next((run.file for run in self.runs if getattr(run.point, key) is None), None)

    def left_out(self, case: Case, file: str) -> dict[tuple[int, str], float]:
        """The times of the runs in `file` that calibrate `case`, each predicted without its run: by run and metric."""
        speed = speed_of(case, [])
        if isinstance(speed, str) or speed.calibration is None:
            return {}
        return {
            (row["run"], row["metric"]): row["left_out_seconds"]
            for row in speed.calibration.document["residuals"]
            if row["left_out_seconds"] is not None and os.path.realpath(row["file"]) == os.path.realpath(file)
        }

    def _nearest(
        self, case: Case, speed: Speed, record: Measured | None, notes: list[Note]
    ) -> tuple[int, list[Observed]]:
        """How close the most relevant runs are to `case`, and their times.

        0 is the same model and type of weights, 1 another model, 2 another type. A note says which
        runs are not used, and why.
        """
        groups: tuple[list[Observed], ...] = ([], [], [])
        unused: dict[tuple[str, str], int] = {}
        for number, run in enumerate(self.runs):
            reason = _elsewhere(run.point, case)
            if reason is not None:
                unused[reason] = unused.get(reason, 0) + 1
                continue
            try:
                case_of_point = case_of_run(run.point, _given(run, case, notes))
                seen = observe(run, number, case_of_point, lambda speed: _with_record(speed, record))
            except KvcalcError as error:
                notes.append(Note("calibration", "refused", f"{run.file}, run {run.point.run}: {error.message}"))
                continue
            other = speed_of(without_calibration(case_of_point), [])
            is_other_type = isinstance(other, str) or other.weight_dtype != speed.weight_dtype
            nearness = 2 if is_other_type else 0 if _is_same(case_of_point.model, case.model) else 1
            groups[nearness].extend(seen)
        for (code, what), times in unused.items():
            runs = "1 run is" if times == 1 else f"{times} runs are"
            notes.append(Note("calibration", code, f"--calibrate: {runs} not used: {what}"))
        nearest = next((place for place, seen in enumerate(groups) if seen), 0)
        return nearest, groups[nearest]


def read_calibration(paths: Sequence[str]) -> Calibration:
    """The calibration in files and folders: any number of records and of results.

    A folder stands for its .json and .jsonl files; those that are neither are left out with a note. A path that does
    not exist is a list, if it has commas. A file that is given twice counts once. Raises UsageError (exit 2) if a file
    is neither, or has no usable part.
    """
    for text in paths:
        check_path(text)
    files: list[tuple[str, bool]] = []
    for path in [path_listed for text in paths for path_listed in _listed_paths(text)]:
        if os.path.isdir(path):
            names = [name for name in list_folder(path) if name.endswith(_ENDINGS)]
            if not names:
                raise UsageError(f"--calibrate {path}: no .json or .jsonl files in this folder", _HINT)
            files += [(os.path.join(path, name), True) for name in names]
        else:
            files.append((path, False))
    files = list({os.path.realpath(file[0]): file for file in reversed(files)}.values())[::-1]
    stamps = tuple(_stamp(path) for path, _ in files)
    return _read_files(tuple(files), stamps)


@lru_cache(maxsize=8)
def _read_files(files: tuple[tuple[str, bool], ...], stamps: tuple[object, ...]) -> Calibration:
    """The calibration in files, each with whether it may be left out. The `stamps` change when the files change."""
    records: list[Record] = []
    runs: list[Run] = []
    notes: list[Note] = []
    for path, is_optional in files:
        try:
            read = _read_file(path)
        except UsageError as error:
            if not is_optional:
                raise
            notes.append(Note("calibration", "refused", error.message))
            continue
        if isinstance(read, Record):
            records.append(read)
        else:
            runs += read
    if not records and not runs:
        raise UsageError(notes[0].text, _HINT)
    if len(runs) > _MOST_RUNS:
        raise UsageError(f"--calibrate: {len(runs):,} runs; at most {_MOST_RUNS:,} are used", "give fewer files")
    return Calibration(records, runs, notes)


_HINT = f"known: kvcalc measure --json, {KNOWN_RESULTS}"


def _listed_paths(text: str) -> list[str]:
    """The paths in `a.json,b.json`. A path that exists may itself have commas."""
    if "," not in text or os.path.exists(text):
        return [text]
    paths = [path.strip() for path in text.split(",")]
    if not all(paths):
        raise UsageError(f"--calibrate {text[:40]!a}: an empty name in the list", "--calibrate a.json,b.json")
    return paths


def _read_file(path: str) -> Record | list[Run]:
    text = read_text(path, MAX_RESULT_BYTES)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if is_record(document):
        return read_record(document, path)
    try:
        return [Run(path, point) for point in read_results(text, path)]
    except UsageError:
        what = "neither a record of kvcalc measure nor the result of a benchmark"
        raise UsageError(f"--calibrate {path}: {what}", _HINT) from None


def _stamp(path: str) -> object:
    try:
        status = os.stat(path)
    except OSError:  # reading it gives the reason
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _elsewhere(point: Point, case: Case) -> tuple[str, str] | None:
    """Why a run is not used for a case: a note's code and text. None if it is used."""
    if point.engine not in (None, case.engine_name):
        return "other-engine", f"measured with {point.engine}, not {case.engine_name}"
    if point.gpu is None:
        return None
    try:
        measured = find_devices(point.gpu).gpu.name
    except KvcalcError:
        measured = point.gpu
    gpu = case.devices.gpu.name
    return None if measured == gpu else ("other-device", f"measured on {measured[:60]}, not {gpu}")


def _given(run: Run, case: Case, notes: list[Note]) -> Given:
    """The question's values for facts that a file does not have."""
    question, point = case.question, run.point
    spec, dtype = published_model(point), question.dtype
    if spec is None:
        spec = case.model
        if point.models:
            text = f"{run.file} names an unknown model, {point.models[0][:60]!a}, which is taken to be {spec.name}"
            notes.append(Note("calibration", "assumed-model", f"--calibrate: {text}"))
    elif _is_same(spec, case.model) and spec.quantization == case.model.quantization:
        spec = case.model
    else:
        dtype = None
    layout = point.layout.over(question.layout._replace(data_parallel_size=None))
    return Given(
        model=spec,
        devices=Devices(case.devices.gpu, layout._replace(data_parallel_size=None).sizes.num_devices),
        engine=case.engine_name if point.release is not None else question.engine,
        engine_settings=question.engine_settings,
        dtype=point.dtype or dtype,
        kv_dtype=None if question.kv_dtype == "auto" else question.kv_dtype,
        layout=layout,
    )


def _is_same(first: ModelSpec, second: ModelSpec) -> bool:
    return (
        first is second
        or first.name == second.name
        or (first.layers, first.attention) == (second.layers, second.attention)
    )


def _with_record(speed: Speed, record: Measured | None) -> Speed:
    return speed if record is None else speed._replace(model=record.apply(speed.model))


def _describe(
    records: Records, applied: str, fitted: Fit | None, observed: Sequence[Observed]
) -> documents.Calibration:
    return {
        "record": None if records.record is None else cast("documents.CalibrationRecord", records.record._asdict()),
        "records": records.number,
        "applied": cast(Any, applied),
        **describe_fit(fitted, observed),
    }
