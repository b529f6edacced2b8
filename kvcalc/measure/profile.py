"""`--profile`: what a device reaches, for several models, contexts, batches and types of cache, in a given time.

The points are measured from the smallest to the largest, all models in turn, so that a profile that ends early has
every model. The document is kept after each point, and a profile that is started again goes on where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcalc.errors import BrokenDeviceError, KvcalcError, UsageError
from kvcalc.measure import runner
from kvcalc.measure.all_reduces import time_all_reduces
from kvcalc.measure.bandwidth import read_roof
from kvcalc.measure.choose import SlowBackends
from kvcalc.measure.devices.device import describe_device, resolve_device
from kvcalc.measure.devices.distributed import device_of
from kvcalc.measure.devices.environment import describe_environment
from kvcalc.measure.devices.faults import faults
from kvcalc.measure.devices.ranks import Place, find_place
from kvcalc.measure.devices.timing import Effort, summarize, time_calls
from kvcalc.measure.expected import COMPILE_SECONDS
from kvcalc.measure.layers.build import TORCH_DTYPES
from kvcalc.measure.progress import PlannedRun, Progress
from kvcalc.memory.kv_cache import decode_read_bytes
from kvcalc.memory.workload import resolve_workload
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import kvcalc.documents as documents

DEFAULT_MODELS = {
    "cuda": ("llama-3.1-8b", "llama-3-70b", "llama-7b", "deepseek-v3"),
    "cpu": ("llama-3.1-8b", "llama-7b"),
}
"""GQA of two sizes, MHA and MLA. A CPU multiplies too slowly for MLA and for the larger one."""

_CONTEXTS = {"cuda": (4096, 16_384, 65_536), "cpu": (512, 2048, 8192)}
_BATCHES = {"cuda": (1, 8, 32), "cpu": (1, 4)}
_KV_DTYPES: dict[str, tuple[str | None, ...]] = {"cuda": (None, "fp8"), "cpu": (None,)}
_LAYERS = {"cuda": 2, "cpu": 1}
_STEPS = 8
# Before the first point has ended, points are expected to take this long, and to read their bytes this many times.
_FIRST_SECONDS, _READS = 3.0, 60
_LAUNCHES = 200


class Point(NamedTuple):
    """One measurement: the model, the type of the cache (None: the model's), and the load. `bytes` are what is read."""

    model: ModelSpec
    kv_dtype: str | None
    context_tokens: int
    batch_size: int
    bytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.model.name, self.kv_dtype, self.context_tokens, self.batch_size


def measure_profile(
    models: Sequence[ModelSpec] | None, *, minutes: float = 10.0, device: str = "auto", dtype: str | None = None,
    kv_dtypes: Sequence[str | None] | None = None, contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None, without_backends: tuple[str, ...] = (), effort: Effort = Effort(),
    progress: Progress | None = None, known: documents.MeasureProfile | None = None,
    keep: Callable[[documents.MeasureProfile], object] = lambda document: None,
) -> documents.MeasureProfile:  # fmt: skip
    """The profile document: the roofs, the time of a launch, and a record of every model and type of cache.

    `models` default to DEFAULT_MODELS. `known` is an earlier document of the same device, whose points are not measured
    again. With torchrun, rank 0 calls this, and the other ranks `time_all_reduces`. `keep` gets the document after each
    point. No point begins that is expected to end after `minutes`. A point that fails is in `skipped`. Raises
    UsageError (exit 2) if `known` is of another device, and what `measure` raises if no point can be measured.
    """
    began, progress = time.monotonic(), Progress() if progress is None else progress
    place = find_place()
    where = device_of(resolve_device(device), place)
    models = models or [load_model(name) for name in DEFAULT_MODELS[_kind(where.type)]]
    points = _points(models, where.type, kv_dtypes, contexts, batches)
    used = resolve_workload(models[0], None, 1, dtype).kv_dtype.name
    described = describe_device(where)
    if known is not None and known["device"]["name"] != described["name"]:
        raise UsageError(
            f"the profile is of {known['device']['name']}, and this is {described['name']}", "use another --save FILE"
        )
    with faults(where):
        progress("roofs", 0, 1)
        if known is None:
            roof = read_roof(where, TORCH_DTYPES.get(used, torch.float32), effort)
            launch = _launch_seconds(where, effort)
        else:
            roof, launch = known["roof"], known["launch"]
    if place.size > 1:
        progress("all-reduces", 0, 1)
        all_reduces = time_all_reduces(device, place, effort)
    else:
        all_reduces = [] if known is None else known.get("all_reduces", [])
    records: list[documents.Measure] = [] if known is None else list(known["records"])
    done = {key for record in records for key in _keys(record)}
    left = [point for point in points if point.key not in done]
    skipped: list[documents.MeasureProfileSkippedItem] = []
    failure: KvcalcError | None = None
    taken, expected, slow = 0.0, 0.0, SlowBackends()
    first = {(point.model.name, point.kv_dtype): point for point in reversed(left)}

    def expected_seconds(point: Point) -> float:
        """The first point of a model and type compiles its kernels."""
        is_first = first[point.model.name, point.kv_dtype] is point
        return _expected_seconds(point, roof) + (COMPILE_SECONDS.get(where.type, 0.0) if is_first else 0.0)

    def document() -> documents.MeasureProfile:
        notes = []
        if left:
            text = (
                f"{len(left)} of {len(points)} points were not measured in {minutes:g} minutes; run it again to go on"
            )
            notes.append(Note("runs", "not-measured", text))
        return {
            "schema_version": SCHEMA_VERSION,
            "device": described,
            "environment": describe_environment(where),
            "roof": roof,
            "launch": launch,
            "all_reduces": all_reduces,
            "records": records,
            "points": [row for record in records for row in _rows(record)],
            "skipped": skipped,
            "not_measured": len(left),
            "warnings": describe_notes(notes),
        }

    progress.plan([PlannedRun(_title(point), {"decode": expected_seconds(point)}) for point in left])
    while left:
        point = left[0]
        pace = taken / expected if expected else 1.0
        ahead = expected_seconds(point) * pace
        if (taken or done) and time.monotonic() - began + ahead > 60 * minutes:
            break
        progress.start(len(progress.runs) - len(left) + 1)
        started = time.monotonic()
        try:
            measured = runner.measure(
                point.model, context_tokens=point.context_tokens, batch_size=point.batch_size, steps=_STEPS,
                num_layers=min(_LAYERS[_kind(where.type)], point.model.num_layers), device=str(where), dtype=dtype,
                kv_dtype=point.kv_dtype, without_backends=without_backends, effort=effort, known_roof=roof, slow=slow,
                place=Place(),
            )  # fmt: skip
            _add(records, measured)
        except BrokenDeviceError:
            raise
        except KvcalcError as error:
            failure = error
            skipped.append({
                "model": point.model.name, "kv_dtype": point.kv_dtype, "context_tokens": point.context_tokens,
                "batch_size": point.batch_size, "reason": error.message,
            })  # fmt: skip
        left.pop(0)
        taken, expected = taken + time.monotonic() - started, expected + expected_seconds(point)
        keep(document())
    if not records and failure is not None:
        raise failure
    return document()


def _kind(kind: str) -> str:
    return "cuda" if kind == "cuda" else "cpu"


def _points(
    models: Sequence[ModelSpec], kind: str, kv_dtypes: Sequence[str | None] | None, contexts: Sequence[int] | None,
    batches: Sequence[int] | None,
) -> list[Point]:  # fmt: skip
    """All points, in the order of the bytes that they read."""
    kind = _kind(kind)
    points = []
    for model in models:
        cut = model.head(min(_LAYERS[kind], model.num_layers))
        used = resolve_workload(cut, None, 1, None).kv_dtype
        for tokens in contexts or _CONTEXTS[kind]:
            for batch in batches or _BATCHES[kind]:
                size = decode_read_bytes(cut, used, tokens, batch)
                points += [Point(model, each, tokens, batch, size) for each in kv_dtypes or _KV_DTYPES[kind]]
    return sorted(points, key=lambda point: point.bytes)


def _title(point: Point) -> str:
    kept = f", {point.kv_dtype}" if point.kv_dtype else ""
    return f"{point.model.name}{kept}, {point.context_tokens:,} tokens, batch {point.batch_size}"


def _expected_seconds(point: Point, roof: documents.MeasureRoof) -> float:
    return _FIRST_SECONDS + _READS * point.bytes / float(roof["read_bytes_per_second"])


def _add(records: list[documents.Measure], measured: documents.Measure) -> None:
    """Add the run of `found` to the record of its model and types, or `found` itself."""

    def kind(record: documents.Measure) -> tuple[Any, ...]:
        return record["model"]["name"], record["workload"]["dtype"], record["workload"]["kv_dtype"]

    for record in records:
        if kind(record) == kind(measured):
            record["runs"] += measured["runs"]
            record["warnings"] += [warning for warning in measured["warnings"] if warning not in record["warnings"]]
            return
    records.append(measured)


def _keys(record: documents.Measure) -> Iterable[tuple[Any, ...]]:
    workload = record["workload"]
    kv_dtype = None if workload["kv_dtype"] == workload["dtype"] else workload["kv_dtype"]
    for run in record["runs"]:
        yield record["model"]["name"], kv_dtype, run["context_tokens"], run["batch_size"]


def _rows(record: documents.Measure) -> Iterable[documents.MeasureProfilePointsItem]:
    """The `points` of a record: the attention of one layer, and its share of the roof that limits it."""
    for run in record["runs"]:
        core, binding = run["attention_core_seconds"], run["binding_roof"]["attention_core"]
        yield {
            "model": record["model"]["name"],
            "attention": run["attention"],
            "kv_dtype": record["workload"]["kv_dtype"],
            "context_tokens": run["context_tokens"],
            "batch_size": run["batch_size"],
            "layer_seconds": core["p50"] / run["num_layers"] if core else None,
            "predicted_layer_seconds": None,
            "kv_read_bytes_per_second": run["kv_read_bytes_per_second"],
            "binding_roof": binding["roof"] if binding else None,
            "fraction_of_binding_roof": binding["fraction"] if binding else None,
            "backend": run["backend"],
        }


def _launch_seconds(device: torch.device, effort: Effort) -> documents.MeasureProfileLaunch:
    """The seconds of a kernel that does nothing else: launched by the host, and in a graph (None without graphs)."""
    tensor = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            tensor.add_(1.0)

    def seconds(may_capture: bool) -> float:
        taken = time_calls(device, launches, 5, may_capture=may_capture, effort=effort).seconds
        return float(summarize(taken)["min"]) / _LAUNCHES

    return {"launched_seconds": seconds(False), "replayed_seconds": seconds(True) if device.type == "cuda" else None}
