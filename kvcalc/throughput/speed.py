"""Build the SpeedModel of a model on a device with an engine, and report where its constants do not apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from kvcalc.errors import LayoutError
from kvcalc.memory.dtypes import Dtype
from kvcalc.model.layout import Layout
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import Regime, device_kind, load_constants, regions, weight_class
from kvcalc.throughput.counts import count
from kvcalc.throughput.roofline import SpeedModel

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.memory.quantization.schemes import Scheme
    from kvcalc.memory.reads import Reads
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.tensors import ModelWeights
    from kvcalc.throughput.hardware import Gpu


class StoredWeights(NamedTuple):
    """A model's weights and their stored types: `base`, `linear` or `scheme` (see kvcalc.memory.weights)."""

    weights: ModelWeights
    base: Dtype
    linear: Dtype | None
    scheme: Scheme | None
    name: str


def check_layout(layout: Layout) -> None:
    """Raise LayoutError (exit 2) if the experts cannot be distributed evenly over the ranks."""
    size, copies, experts = layout.tensor_parallel_size, layout.attention_copies, layout.expert_parallel_size
    if layout.ranks % experts and copies > 1:
        over = f"--dp {copies} x --tp {size}" if layout.prompt_ranks == 1 else f"{layout.ranks} devices"
        raise LayoutError(
            f"--ep {experts} does not divide {over}", f"experts are split over these {layout.ranks} devices"
        )
    if size % experts and copies == 1:
        raise LayoutError(f"--ep {experts} does not divide --tp {size}", "experts are split over the --tp devices")


def speed_model(
    spec: ModelSpec, stored: StoredWeights, reads: Reads, gpu: Gpu, engine: str, layout: Layout = Layout(),
    spread_names: frozenset[str] = frozenset(),
) -> tuple[SpeedModel, Regime]:  # fmt: skip
    """The speed of `spec` (bound to its workload) with `engine`, and the regime of its constants.

    `reads` is what a step reads of one rank's cache. `engine` may end in a release: `vllm@0.12`.
    `spread_names` are the weights that all copies of the attention divide among them. This takes about a
    millisecond, and `SpeedModel.decode` then takes microseconds. So keep the result and use it for many batches and
    contexts.
    """
    counts = count(spec, stored.weights, stored.base, reads, layout, stored.linear, stored.scheme, spread_names)
    constants, regime = load_constants(engine, gpu)
    return SpeedModel(counts, gpu, constants), regime


class Gap(NamedTuple):
    """Something about a question that the fit did not cover.

    With `is_unmeasured`, nothing at all was measured of this kind of device, type of weights or way to split a model.
    """

    text: str
    is_unmeasured: bool = False


def outside(model: SpeedModel, regime: Regime, weight_dtype: str, batch: float) -> list[Gap]:
    """The properties of this question that the fit did not cover. Empty if it covered all of them."""
    if not regime.device_kinds:
        return [Gap("this engine", True)]
    kind, link, layout, experts = device_kind(model.gpu), model.gpu.interconnect, model.layout, model.counts.experts
    like = "a device of unknown kind" if model.gpu.device_class is None else f"devices like {model.gpu.name} ({kind})"
    most_ranks = regime.largest_tensor_parallel_size
    # Whether it is so, what to call it, and whether nothing at all was measured of it.
    rows = (
        (kind not in regime.device_kinds, like, kind not in regime.checked_device_kinds),
        (weight_class(weight_dtype) not in regime.weight_classes, f"{weight_dtype} weights", True),
        (batch > regime.largest_batch, f"batches beyond {regime.largest_batch:,}", False),
        (regime.older_than is not None, f"releases before {regime.older_than}", False),
        (layout.tensor_parallel_size > most_ranks, f"--tp beyond {most_ranks}", True),
        (experts and not regime.has_experts, "models with experts", True),
        (layout.prompt_ranks > 1, "prefill context parallelism", True),
        (experts and layout.data_parallel_size > 1, "DP ranks (--dp)", False),
        (layout.token_ranks > 1, "decode context parallelism", True),
        (model.host is not None, "models with a part in host memory", False),
        (model.host_launch_seconds, "launches without CUDA graphs", False),
        (model.counts.adapters is not None, "LoRA adapters", False),
    )
    gaps = [Gap(text, is_unmeasured) for is_there, text, is_unmeasured in rows if is_there]
    if link is not None and layout.num_devices > link.devices:
        gaps.append(Gap(f"more than the {link.devices} devices that {link.name} connects", True))
    return gaps


def gap_note(gaps: Sequence[Gap]) -> Note:
    """The note about what the fit did not cover."""
    unmeasured, others = (", ".join(gap.text for gap in gaps if gap.is_unmeasured is each) for each in (True, False))
    if not unmeasured:
        return Note("throughput", "not-fitted", f"not fitted for {others}: the estimate is less certain")
    text = f"no measurement of {unmeasured}: times may be half or twice the estimate"
    return Note("throughput", "not-fitted", f"{text}; not fitted for {others} either" if others else text)


WIDEST_RANGE = 4.0
"""A range with a larger ratio of its ends says nothing, so documents say that it is not known."""

RANGED = (
    (None, "decode", "decode_step_seconds", "low_seconds", "high_seconds"),
    ("serving", "tpot", "tpot_seconds", "tpot_low_seconds", "tpot_high_seconds"),
    ("serving", "ttft", "ttft_seconds", "ttft_low_seconds", "ttft_high_seconds"),
)
"""The figures of the `throughput` document that have a range: the part they are in, their metric, and their keys."""


def known_range(low: float, high: float) -> tuple[float | None, float | None]:
    """The ends of a range, or None for both if it is wider than `WIDEST_RANGE`."""
    return (low, high) if high <= WIDEST_RANGE * low else (None, None)


def hide_wide_ranges(throughput: documents.Throughput) -> None:
    """Set the ranges of a `throughput` document that are not known (`known_range`) to null."""
    for part, metric, _, low_key, high_key in RANGED:
        values: Any = throughput if part is None else throughput.get(part)
        if values is None or values.get(low_key) is None:
            continue
        values[low_key], values[high_key] = known_range(values[low_key], values[high_key])
        if metric == "tpot" and values[low_key] is None:
            values["tokens_per_second_low"] = values["tokens_per_second_high"] = None
    energy = throughput.get("energy")
    if energy is not None and throughput.get("low_seconds", 0.0) is None:
        energy["low_joules_per_token"] = energy["high_joules_per_token"] = None


_UNMEASURED = 2.0
"""A time may be this many times its estimate, or that part of it, if there is no measurement of its kind."""


def range_factors(
    model: SpeedModel, ranges: Mapping[str, Sequence[float]], weight_dtype: str, batch: float, gaps: Sequence[Gap]
) -> tuple[float, float]:
    """The factors on a time for its low and high end, from the narrowest region of the question that has a range.

    If nothing like the question was measured, they are at least half and twice the estimate. With other gaps, the range
    is 1.5 times as wide (as a ratio), as far as it is not wider than that.
    """
    places = regions(device_kind(model.gpu), weight_class(weight_dtype), batch)
    low, high = next(ranges[place] for place in places if place in ranges)
    widest = min(low, 1 / _UNMEASURED), max(high, _UNMEASURED)
    if any(gap.is_unmeasured for gap in gaps):
        return widest
    return (max(low**1.5, widest[0]), min(high**1.5, widest[1])) if gaps else (low, high)


def judged_factor(high: float, confidence: int) -> float:
    """The factor on an estimate that is compared with a limit. `high` is the factor for the upper end of its range.

    It is 1 for a confidence of 50 and `high` for 80. Others follow a log-normal distribution through these two. A range
    that is too wide to be printed counts too: the less is known, the slower a layout is taken to be.
    """
    return float(high ** _deviations(confidence))


@cache
def _deviations(confidence: int) -> float:
    """The normal quantile of a confidence in per cent, as a multiple of that of 80."""
    from statistics import NormalDist

    quantile = NormalDist().inv_cdf
    return quantile(confidence / 100) / quantile(0.8)
