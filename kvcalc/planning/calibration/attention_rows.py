"""Records of `kvcalc measure` beside the estimate: the attention of all layers in one step, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import mean
from typing import TYPE_CHECKING, Any

from kvcalc.engines import SERVERS
from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.model.resolve import find_published, load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.calibration.measured import Given
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.calibrate import records_in
from kvcalc.throughput.hardware import Devices, find_devices

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Attention's constants are the engine's that is asked for, else those of this one.
ENGINE = SERVERS[0]


def attention_rows(document: Mapping[str, Any], file: str, given: Given) -> list[documents.ScoreRow]:
    """A row of a score document for every run of a record or a profile that has attention.

    Raises UsageError (exit 2) if the device has no preset and `given` has none, and ModelError (exit 3) for a model
    that is not known.
    """
    rows: list[documents.ScoreRow] = []
    for record in records_in(dict(document)):
        devices = given.devices or _devices_of(record)
        model = given.model or _model_of(record)
        dtype = record["workload"]["kv_dtype"]
        for run in record["runs"]:
            core = run["attention_core_seconds"]
            if core is None or run["attention"] != record["model"]["attention"]:
                continue
            lengths = run.get("lengths") or [run["context_tokens"]] * run["batch_size"]
            measured = core["p50"] * model.num_layers / run["num_layers"]
            predicted = _seconds(model, dtype, devices, lengths, given, given.calibration)
            before = predicted if given.calibration is None else _seconds(model, dtype, devices, lengths, given, None)
            row = _row(file, len(rows) + 1, model.name, given.engine or ENGINE, devices, lengths, measured, predicted)
            row["uncalibrated_seconds"] = None if given.calibration is None else before
            rows.append(row)
    return rows


def add_predictions(document: documents.MeasureProfile) -> str | None:
    """Fill in the estimate's figure for each point of a profile. Returns the name of the device's preset, or None."""
    try:
        devices = find_devices(document["device"]["name"])
    except KvcalcError:
        return None
    for point in document["points"]:
        lengths = [point["context_tokens"]] * point["batch_size"]
        with suppress(KvcalcError):
            model = load_model(point["model"])
            seconds = _seconds(model, point["kv_dtype"], devices, lengths, Given(), None)
            point["predicted_layer_seconds"] = seconds / model.num_layers
    return devices.gpu.name


def _seconds(
    model: ModelSpec, kv_dtype: str, devices: Devices, lengths: Sequence[int], given: Given, calibration: Any
) -> float:
    question = Question(
        model, max(lengths), len(lengths), None, kv_dtype, given.engine or ENGINE,
        devices=devices._replace(num_devices=1), tensor_parallel_size=1, speed=SpeedQuestion(calibration=calibration),
    )  # fmt: skip
    speed = speed_of(make_case(question), [])
    if not isinstance(speed, Speed):
        raise UsageError(f"no prediction: {speed}")
    return sum(speed.model.attention_seconds(number, tokens) for tokens, number in Counter(lengths).items())


def _row(
    file: str, number: int, model: str, engine: str, devices: Devices, lengths: Sequence[int], measured: float,
    predicted: float,
) -> documents.ScoreRow:  # fmt: skip
    context_tokens, batch_size = round(mean(lengths)), len(lengths)
    return {
        "file": file, "run": number, "tool": "kvcalc-measure", "model": model, "engine": engine,
        "gpu": devices.gpu.name,
        "num_devices": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "input_tokens": context_tokens, "output_tokens": 1, "context_tokens": context_tokens,
        "concurrency": batch_size, "concurrency_is_average": False, "metric": "attention",
        "measured_seconds": measured, "mean_seconds": None, "median_seconds": measured,
        "predicted_seconds": predicted, "low_seconds": None, "high_seconds": None, "error": predicted / measured - 1,
        "in_range": None, "largest_part": "kv", "largest_part_seconds": predicted,
        "largest_part_factor": measured / predicted, "uncalibrated_seconds": None, "left_out_seconds": None,
    }  # fmt: skip


def _devices_of(record: Mapping[str, Any]) -> Devices:
    name = str(record["device"]["name"])
    try:
        return find_devices(name)
    except KvcalcError:
        raise UsageError(f"{name[:60]} in the record is not a known device", "name it: --gpu h100") from None


def _model_of(record: Mapping[str, Any]) -> ModelSpec:
    name = str(record["model"]["name"])
    published = find_published(name)
    if published is None:
        raise ModelError(f"the record names an unknown model, {name[:80]!a}", "name it: --model PRESET")
    return published
