"""Replace fitted constants with measured ones, from records that `kvcalc measure --json` wrote on your device.

A record only has timings of attention: the read roof, the attention core over the cache, and a step with its
projections. So only these constants can be replaced. Results of a benchmark calibrate in another way (`factor_fit`).

    bandwidth       the record's read roof instead of the vendor's figure
    kv_overhead     b x the read roof, where the core of a layer takes a + b x bytes. a, the fixed time of a kernel, is
                    not a rate: a run over a short cache would make every load slow. So this needs runs of at least two
                    sizes of cache
    weight_overhead on a CPU, where launches cost nothing: the read roof divided by the rate at which the projections
                    are read

The time of a launch is the engine's: `kvcalc measure` replays a graph, which no engine does in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from kvcalc.errors import GpuError, UsageError
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import weight_class
from kvcalc.throughput.hardware import Gpu, find_gpu
from kvcalc.throughput.roofline import SpeedModel

# Read roofs of one device that differ by more than this cause a note.
_ALIKE = 1.25
Part = dict[str, Any]
"""A record of `kvcalc measure`, or a part of it, as the file has it."""

# Plausible range of the read roof relative to the vendor's bandwidth.
_LEAST_REACHED, _MOST_REACHED = 0.5, 1.1
# To separate a fixed time from a rate, the caches of two runs must differ at least this much in size.
_LEAST_APART = 2.0


class Point(NamedTuple):
    """The times of one run, in seconds for each layer.

    `core` is attention over the cache, and `rest` what a step takes beyond it. `cache` and `projections` are what
    reading them would take at the read roof. `is_read_bound` says whether multiplying takes the core less time than
    reading, and `is_rest_read_bound` the same for the projections.
    """

    core: float
    cache: float
    rest: float
    projections: float
    is_read_bound: bool
    is_rest_read_bound: bool


class Record(NamedTuple):
    """What a record says about a device. The rate is in bytes per second."""

    device: str
    is_cpu: bool
    read_bytes_per_second: float
    points: tuple[Point, ...]

    def doubts(self, gpu: Gpu) -> list[Note]:
        """A note if the record is of another device, by its name or by its read roof.

        The read roof is usually between half of the vendor's bandwidth and all of it.
        """
        named = _device_named(self.device)
        if named is not None and named.name != gpu.name and named.bandwidth_bytes_per_second:
            text = f"--calibrate: the record is of {named.name}, not of {gpu.name}; is it the same?"
            return [Note("calibration", "other-device", text)]
        share = self.read_bytes_per_second / gpu.bandwidth_bytes_per_second
        if _LEAST_REACHED <= share <= _MOST_REACHED:
            return []
        read, stated = (
            f"{rate / 1e9:,.0f} GB/s" for rate in (self.read_bytes_per_second, gpu.bandwidth_bytes_per_second)
        )
        text = f"--calibrate: {self.device} in the record reads {read}, but {gpu.name} has {stated}; is it the same?"
        return [Note("calibration", "other-device", text)]


class Measured(NamedTuple):
    """The constants from one or more records of a device. Overheads are factors of at least 1, None if not determined.

    `kernel_seconds` is always None. It is kept for readers of documents that older releases wrote.
    """

    device: str
    read_bytes_per_second: float
    kv_overhead: float | None
    kernel_seconds: None
    weight_overhead: float | None

    def apply(self, model: SpeedModel, weight_dtype: str) -> SpeedModel:
        """`model` with these constants. Constants that the records do not determine stay unchanged."""
        old = model.constants
        gpu = model.gpu._replace(bandwidth_bytes_per_second=max(1, int(self.read_bytes_per_second)), inline_ecc=False)
        # Fitted overheads are relative to the vendor's bandwidth. The read roof already excludes what is not reachable.
        reached = self.read_bytes_per_second / model.gpu.read_bytes_per_second
        weights = {kind: max(1.0, value * reached) for kind, value in old.weight_overhead.items()}
        if self.weight_overhead is not None:
            weights[weight_class(weight_dtype)] = self.weight_overhead
        cache = max(1.0, old.kv_overhead * reached) if self.kv_overhead is None else self.kv_overhead
        new = old._replace(
            weight_overhead=weights,
            expert_overhead=max(1.0, old.expert_overhead * reached),
            kv_overhead=cache,
        )
        return SpeedModel(model.counts, gpu, new)


class Records(NamedTuple):
    """The constants from the records that are used for a device, how many they are, and notes about doubtful ones."""

    record: Measured | None
    number: int
    notes: tuple[Note, ...] = ()


def combine(records: Sequence[Record], gpu: Gpu) -> Records:
    """The constants from the records that can be of `gpu`; from all records if none of them can be."""
    doubted = [(record, record.doubts(gpu)) for record in records]
    used = [record for record, doubts in doubted if not doubts] or list(records)
    notes = [
        note if record in used else note._replace(text=note.text.replace("; is it the same?", "; it is not used"))
        for record, doubts in doubted
        for note in doubts
    ]
    if not used:
        return Records(None, 0)
    rates = [record.read_bytes_per_second for record in used]
    if max(rates) > _ALIKE * min(rates):
        low, high = (f"{rate / 1e9:,.0f}" for rate in (min(rates), max(rates)))
        text = f"--calibrate: the records read {low} to {high} GB/s; the median of {len(used)} records is used"
        notes.append(Note("calibration", "records-differ", text))
    points = [point for record in used for point in record.points]
    kv_overhead = _kv_overhead([point for point in points if point.is_read_bound])
    if kv_overhead is None:
        text = "--calibrate: the runs are of one size of cache, so the rate over the cache stays the fitted one"
        notes.append(Note("calibration", "one-point", f"{text}; a sweep measures more: --sweep context=8k:32k"))
    together = Measured(
        ", ".join(dict.fromkeys(record.device for record in used))[:60],
        median(rates),
        kv_overhead,
        None,
        _weight_overhead(point for record in used if record.is_cpu for point in record.points),
    )
    return Records(together, len(used), tuple(notes))


def _kv_overhead(points: Sequence[Point]) -> float | None:
    """The slope of the core's time over the ideal time, at least 1. None if the caches are of one size.

    Least squares of the relative errors of `fixed + slope x ideal`, with a fixed time of at least 0.
    """
    sizes = [point.cache for point in points]
    if not sizes or max(sizes) < _LEAST_APART * min(sizes):
        return None
    # The errors relative to the times: (fixed x u + slope x v - 1) is to be small.
    pairs = [(1 / point.core, point.cache / point.core) for point in points]
    uu, vv, uv = (
        sum(a * b for a, b in both) for both in ([(u, u) for u, _ in pairs], [(v, v) for _, v in pairs], pairs)
    )
    sum_u, sum_v = sum(u for u, _ in pairs), sum(v for _, v in pairs)
    determinant = uu * vv - uv * uv
    fixed = (sum_u * vv - sum_v * uv) / determinant if determinant > 0 else 0.0
    slope = (sum_v - max(0.0, fixed) * uv) / vv
    return max(1.0, slope)


def _weight_overhead(points: Iterable[Point]) -> float | None:
    found = [point.rest / point.projections for point in points if point.is_rest_read_bound and point.projections > 0]
    return max(1.0, median(found)) if found else None


def _device_named(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except GpuError:
        return None


def is_record(document: object) -> bool:
    """Whether a JSON document is a record of `kvcalc measure`, even if it lacks some figures."""
    return isinstance(document, dict) and ("roof" in document or "runs" in document)


def records_in(document: Part) -> list[Part]:
    """The records in a document: those of a profile, else the document itself."""
    records = document.get("records")
    return [each for each in records if isinstance(each, dict)] if isinstance(records, list) else [document]


def read_record(document: Part, path: str) -> Record:
    """The figures of the record or profile at `path`. UsageError (exit 2) if it lacks one.

    Only a profile's runs with the model's own type of cache count: 8-bit runs use kvcalc's own kernel, which engines do
    not have.
    """
    read = [_read_one(record, path) for record in records_in(document) if "records" not in document or _is_own(record)]
    if not read:
        raise _refused(path, "it has no runs")
    return read[0]._replace(points=tuple(point for record in read for point in record.points))


def _is_own(record: Part) -> bool:
    workload = _part(record, "workload")
    return workload.get("kv_dtype") == workload.get("dtype")


def _read_one(record: Part, path: str) -> Record:
    described = _part(record, "device")
    return Record(
        str(described.get("name") or "the measured device")[:60],
        described.get("kind") == "cpu",
        _number(path, record, "roof", "read_bytes_per_second"),
        tuple(_point(path, run) for run in _runs(path, record)),
    )


def _point(path: str, run: Part) -> Point:
    step = _number(path, run, "decode_step_seconds", "p50")
    core = _number(path, run, "attention_core_seconds", "p50")
    read_share = _number(path, run, "fraction_of_roof", "attention_core")
    step_share = _number(path, run, "fraction_of_roof", "step")
    layers = run.get("num_layers")
    if type(layers) is not int or layers < 1:
        raise _refused(path, "runs[].num_layers is not a whole number of at least 1")
    # Seconds to read the projections at the read roof: those for all bytes of the step minus those for the cache.
    cache, projections = core * read_share, step * step_share - core * read_share
    shares = _part(run, "fraction_of_matmul_roof")
    core_multiplies = core * (shares.get("attention_core") or 0)
    rest_multiplies = step * (shares.get("step") or 0) - core_multiplies
    return Point(
        core / layers, cache / layers, (step - core) / layers, projections / layers,
        core_multiplies <= cache, rest_multiplies <= projections,
    )  # fmt: skip


def _runs(path: str, record: Part) -> list[Part]:
    """The runs with the model's own attention, or else those with the first run's."""
    runs = record.get("runs")
    found = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    if not found:
        raise _refused(path, "it has no runs")
    own = _part(record, "model").get("attention")
    own = own if any(run.get("attention") == own for run in found) else found[0].get("attention")
    return [run for run in found if run.get("attention") == own]


def _number(path: str, mapping: Part, key: str, inner: str) -> float:
    value = _part(mapping, key).get(inner)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise _refused(path, f"{key}.{inner} is not a number above 0")
    return float(value)


def _part(mapping: Part, key: str) -> Part:
    part = mapping.get(key)
    return part if isinstance(part, dict) else {}


def _refused(path: str, why: str) -> UsageError:
    return UsageError(f"--calibrate {path}: {why}", "write a record on your device: kvcalc measure MODEL --json > FILE")
