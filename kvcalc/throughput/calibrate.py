"""Replace fitted constants with measured ones, from records that `kvcalc measure --json` wrote on your device.

A record tells what the device reaches, and what torch reaches on it. Only the first carries over to an engine. Results
of a benchmark calibrate in another way (`factor_fit`).

    bandwidth       the record's read roof instead of the vendor's figure
    kv_overhead     on CUDA: b x the read roof, where the core of a layer takes a + b x bytes. a, the fixed time of a
                    kernel, is not a rate: a run over a short cache would make every load slow. So this needs runs of at
                    least two sizes of cache. The kernels there are of the kind that engines have, and the roof limits
                    both. On other devices, an engine reads the cache with kernels of its own

The projections are torch's own products. On a CPU they read a fifth of the roof, where llama.cpp reads most of it. The
time of a launch is the engine's too: `kvcalc measure` replays a graph, which no engine does in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from kvcalc.errors import GpuError, UsageError
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import CUSTOM, Gpu, find_gpu
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

    `core` is attention over the cache, and `cache` what reading it would take at the read roof. `is_read_bound` says
    whether multiplying takes the core less time than reading.
    """

    core: float
    cache: float
    is_read_bound: bool


class Record(NamedTuple):
    """What a record says about a device. The rate is in bytes per second. `kind` is torch's: cuda, cpu, mps or xpu."""

    device: str
    kind: str | None
    read_bytes_per_second: float
    points: tuple[Point, ...]

    def is_of(self, gpu: Gpu) -> bool:
        """Whether the record may be of `gpu`: unless its name is another device's, or it is of a CPU.

        A device that is described by its figures has no name, and every named device is an accelerator.
        """
        named = _device_named(self.device)
        return gpu.name == CUSTOM or (self.kind != "cpu" if named is None else named.name == gpu.name)

    def doubts(self, gpu: Gpu) -> list[Note]:
        """A note if the record is of another device, by its name or by its read roof.

        The read roof is usually between half of the vendor's bandwidth and all of it.
        """
        if not self.is_of(gpu):
            text = f"--calibrate: the record is of {self.device}, not of {gpu.name}; it is not used"
            return [Note("calibration", "other-device", text)]
        share = self.read_bytes_per_second / gpu.bandwidth_bytes_per_second
        if _LEAST_REACHED <= share <= _MOST_REACHED:
            return []
        read, stated = (
            f"{rate / 1e9:,.0f} GB/s" for rate in (self.read_bytes_per_second, gpu.bandwidth_bytes_per_second)
        )
        text = f"--calibrate: {self.device} in the record reads {read}, but {gpu.name} has {stated}; is it the same?"
        return [Note("calibration", "other-device", text)]

    def refusal(self, gpu: Gpu) -> UsageError:
        """The error for a record of another device than `gpu`, if there is nothing else to calibrate with."""
        named = _device_named(self.device)
        described = "--gpu-memory SIZE --gpu-bandwidth RATE --flops RATE" if named is None else f"--gpu {named.name}"
        return UsageError(
            f"--calibrate: the record is of {self.device}, not of {gpu.name}",
            f"ask for the measured device: {described}; or run there: kvcalc measure --profile --save FILE",
        )


class Measured(NamedTuple):
    """The constants from one or more records of a device. Overheads are factors of at least 1, None if not determined.

    `kernel_seconds` and `weight_overhead` are always None. They are kept for readers of older releases' documents.
    """

    device: str
    read_bytes_per_second: float
    kv_overhead: float | None
    kernel_seconds: None = None
    weight_overhead: None = None

    def apply(self, model: SpeedModel) -> SpeedModel:
        """`model` with these constants. Constants that the records do not determine stay unchanged."""
        old = model.constants
        gpu = model.gpu._replace(bandwidth_bytes_per_second=max(1, int(self.read_bytes_per_second)), inline_ecc=False)
        # Fitted overheads are relative to the vendor's bandwidth. The read roof already excludes what is not reachable.
        reached = self.read_bytes_per_second / model.gpu.read_bytes_per_second
        weights = {kind: max(1.0, value * reached) for kind, value in old.weight_overhead.items()}
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
    """The constants from the records that can be of `gpu`. Doubtful rates count only if all rates are doubtful."""
    doubted = [(record, record.doubts(gpu)) for record in records]
    used = [record for record, doubts in doubted if not doubts] or [record for record in records if record.is_of(gpu)]
    notes = [
        note if record in used else note._replace(text=note.text.replace("; is it the same?", "; it is not used"))
        for record, doubts in doubted
        for note in doubts
    ]
    if not used:
        return Records(None, 0, tuple(notes))
    rates = [record.read_bytes_per_second for record in used]
    if max(rates) > _ALIKE * min(rates):
        low, high = (f"{rate / 1e9:,.0f}" for rate in (min(rates), max(rates)))
        text = f"--calibrate: the records read {low} to {high} GB/s; the median of {len(used)} records is used"
        notes.append(Note("calibration", "records-differ", text))
    on_cuda = [record for record in used if record.kind == "cuda"]
    kv_overhead = _kv_overhead([point for record in on_cuda for point in record.points if point.is_read_bound])
    if not on_cuda:
        text = "--calibrate: of the record, only the read roof is used: engines have other kernels than torch there"
        notes.append(Note("calibration", "read-roof-only", text))
    elif kv_overhead is None:
        text = "--calibrate: the runs are of one size of cache, so the rate over the cache stays the fitted one"
        notes.append(Note("calibration", "one-point", f"{text}; a sweep measures more: --sweep context=8k:32k"))
    devices = ", ".join(dict.fromkeys(record.device for record in used))[:60]
    return Records(Measured(devices, median(rates), kv_overhead), len(used), tuple(notes))


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
        described.get("kind"),
        _number(path, record, "roof", "read_bytes_per_second"),
        tuple(_point(path, run) for run in _runs(path, record)),
    )


def _point(path: str, run: Part) -> Point:
    core = _number(path, run, "attention_core_seconds", "p50")
    cache = core * _number(path, run, "fraction_of_roof", "attention_core")
    layers = run.get("num_layers")
    if type(layers) is not int or layers < 1:
        raise _refused(path, "runs[].num_layers is not a whole number of at least 1")
    multiplying = core * (_part(run, "fraction_of_matmul_roof").get("attention_core") or 0)
    return Point(core / layers, cache / layers, multiplying <= cache)


def _runs(path: str, record: Part) -> list[Part]:
    """The runs with the model's own attention, or else those with the first run's."""
    runs = record.get("runs")
    records = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    if not records:
        raise _refused(path, "it has no runs")
    attention = _part(record, "model").get("attention")
    attention = attention if any(run.get("attention") == attention for run in records) else records[0].get("attention")
    return [run for run in records if run.get("attention") == attention]


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
