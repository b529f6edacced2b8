"""Replace fitted constants with measured ones, from a record that `kvcalc measure --json` wrote on your device.

A record only has timings of attention: the read roof, the attention core over the cache, and a step with its
projections. So only these constants can be replaced. Results of a benchmark calibrate in another way (`factor_fit`).

    bandwidth       the record's read roof instead of the vendor's figure
    kv_overhead     the read roof divided by the rate at which the core reads the cache
    kernel_seconds  on an accelerator: the time that a step takes beyond the core and beyond reading its projections, by
                    the number of kernels. What the core takes beyond the roof is in kv_overhead already
    weight_overhead on a CPU, where launches cost nothing: the read roof divided by the rate at which the projections
                    are read
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import weight_class
from kvcalc.throughput.hardware import Gpu
from kvcalc.throughput.roofline import SpeedModel

# The kernels of attention in a layer, as `kvcalc.throughput.launches` counts them: the norm, the projections of the
# input, the attention with its rotary embedding and write, the projection of the output. MLA has two more norms, two
# more projections, and an attention that counts as 12 instead of 3.
_LAUNCHES, _LATENT_LAUNCHES = 6, 19
# Read roofs of one device that differ by more than this are doubted.
_ALIKE = 1.25
# Plausible range of the read roof relative to the vendor's bandwidth.
_LEAST_REACHED, _MOST_REACHED = 0.5, 1.1


class Record(NamedTuple):
    """The constants from a record. Rates are in bytes per second, overheads are factors of at least 1."""

    device: str
    read_bytes_per_second: float
    kv_overhead: float
    kernel_seconds: float | None
    weight_overhead: float | None

    def doubts(self, gpu: Gpu) -> list[Note]:
        """A note if the record is probably from a different device.

        The read roof is usually between half of the vendor's bandwidth and all of it.
        """
        share = self.read_bytes_per_second / gpu.bandwidth_bytes_per_second
        if _LEAST_REACHED <= share <= _MOST_REACHED:
            return []
        read, stated = (
            f"{rate / 1e9:,.0f} GB/s" for rate in (self.read_bytes_per_second, gpu.bandwidth_bytes_per_second)
        )
        text = f"--calibrate: {self.device} in the record reads {read}, but {gpu.name} has {stated}; is it the same?"
        return [Note("calibration", "other-device", text)]

    def apply(self, model: SpeedModel, weight_dtype: str) -> SpeedModel:
        """`model` with these constants. Constants that the record does not determine stay unchanged."""
        old = model.constants
        gpu = model.gpu._replace(bandwidth_bytes_per_second=max(1, int(self.read_bytes_per_second)), inline_ecc=False)
        # Fitted overheads are relative to the vendor's bandwidth. The read roof already excludes what is not reachable.
        reached = self.read_bytes_per_second / model.gpu.read_bytes_per_second
        weights = {kind: max(1.0, value * reached) for kind, value in old.weight_overhead.items()}
        if self.weight_overhead is not None:
            weights[weight_class(weight_dtype)] = self.weight_overhead
        new = old._replace(
            weight_overhead=weights,
            expert_overhead=max(1.0, old.expert_overhead * reached),
            kv_overhead=self.kv_overhead,
            kernel_seconds=old.kernel_seconds if self.kernel_seconds is None else self.kernel_seconds,
        )
        return SpeedModel(model.counts, gpu, new)


class Records(NamedTuple):
    """The records that are used for a device as one, how many they are, and what is doubtful about them."""

    record: Record | None
    number: int
    notes: tuple[Note, ...] = ()


def combine(records: Sequence[Record], gpu: Gpu) -> Records:
    """The median of each constant, over the records that can be of `gpu`; over all records if none of them can be."""
    doubted = [(record, record.doubts(gpu)) for record in records]
    used = [record for record, doubts in doubted if not doubts] or list(records)
    notes = [
        note if record in used else note._replace(text=note.text.replace("; is it the same?", "; it is not used"))
        for record, doubts in doubted
        for note in doubts
    ]
    if len(used) < 2:
        return Records(used[0] if used else None, len(used), tuple(notes))
    rates = [record.read_bytes_per_second for record in used]
    if max(rates) > _ALIKE * min(rates):
        low, high = (f"{rate / 1e9:,.0f}" for rate in (min(rates), max(rates)))
        text = f"--calibrate: the records read {low} to {high} GB/s; the medians of {len(used)} records are used"
        notes.append(Note("calibration", "records-differ", text))

    def middle(constant: Callable[[Record], float | None]) -> float | None:
        known = [value for record in used if (value := constant(record)) is not None]
        return median(known) if known else None

    together = Record(
        ", ".join(dict.fromkeys(record.device for record in used))[:60],
        median(rates),
        median(record.kv_overhead for record in used),
        middle(lambda record: record.kernel_seconds),
        middle(lambda record: record.weight_overhead),
    )
    return Records(together, len(used), tuple(notes))


def is_record(document: object) -> bool:
    """Whether a JSON document is a record of `kvcalc measure`, even if it lacks some figures."""
    return isinstance(document, dict) and ("roof" in document or "runs" in document)


def read_record(record: dict[str, Any], path: str) -> Record:
    """The constants of a record, the document at `path`. UsageError (exit 2) if it lacks a figure."""
    roof = _number(path, record, "roof", "read_bytes_per_second")
    run = _run(path, record)
    step = _number(path, run, "decode_step_seconds", "p50")
    core = _number(path, run, "attention_core_seconds", "p50")
    read_share = _number(path, run, "fraction_of_roof", "attention_core")
    step_share = _number(path, run, "fraction_of_roof", "step")
    layers = run.get("num_layers")
    if type(layers) is not int or layers < 1:
        raise _refused(path, "runs[].num_layers is not a whole number of at least 1")
    described = _part(record, "device")
    # Seconds to read the projections at the read roof: those for all bytes of the step minus those for the cache.
    projections = step * step_share - core * read_share
    is_cpu = described.get("kind") == "cpu"
    beyond = max(0.0, step - core - max(0.0, projections))
    launches = _LATENT_LAUNCHES if run.get("attention") == "mla" else _LAUNCHES
    overhead = max(1.0, (step - core) / projections) if projections > 0 else 1.0
    return Record(
        str(described.get("name") or "the measured device")[:60],
        roof,
        max(1.0, 1 / read_share),
        None if is_cpu else beyond / (layers * launches),
        overhead if is_cpu else None,
    )


def _run(path: str, record: dict[str, Any]) -> dict[str, Any]:
    """The run with the model's own attention, or else the first run."""
    runs = record.get("runs")
    found = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    if not found:
        raise _refused(path, "it has no runs")
    own = _part(record, "model").get("attention")
    return next((run for run in found if run.get("attention") == own), found[0])


def _number(path: str, mapping: dict[str, Any], key: str, inner: str) -> float:
    value = _part(mapping, key).get(inner)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise _refused(path, f"{key}.{inner} is not a number above 0")
    return float(value)


def _part(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    part = mapping.get(key)
    return part if isinstance(part, dict) else {}


def _refused(path: str, why: str) -> UsageError:
    return UsageError(f"--calibrate {path}: {why}", "write a record on your device: kvcalc measure MODEL --json > FILE")
