"""A calibration as it applies to one model on one device with one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.throughput.factor_fit import Fit, slopes_between
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.speed import RANGED, judged_factor

if TYPE_CHECKING:
    import kvcalc.documents as documents


class Applied(NamedTuple):
    """What a calibration changed, and the remaining uncertainty.

    `fit` is None if the range does not change: the runs are of another model, or there are no runs. `near` are the
    calibrated models with one factor changed a little, in the order of `Factors`. `document` is the `calibration` part
    of a document.
    """

    document: documents.Calibration
    notes: tuple[Note, ...] = ()
    fit: Fit | None = None
    near: tuple[SpeedModel, ...] = ()

    def range(
        self, metric: str, seconds: float, seconds_of: Callable[[SpeedModel], float], low: float, high: float
    ) -> tuple[float, float]:
        """The factors on `seconds` for the ends of its range. `low` and `high` are those without a calibration."""
        if self.fit is None:
            return low, high
        return self.fit.range(metric, slopes_between(seconds, list(map(seconds_of, self.near))), low, high)

    def narrow(
        self, document: documents.Throughput, here: documents.Throughput, near: Sequence[documents.Throughput]
    ) -> None:
        """Replace the ranges in a `throughput` document.

        `here` and `near` are the documents in the short form of the same model, and of the models in `near`: runs of a
        simulation differ more than these.
        """
        if self.fit is None:
            return
        for part, metric, key, low_key, high_key in RANGED:
            every: list[Any] = [document, here, *near]
            estimates, closed, *others = every if part is None else [factors[part] for factors in every]
            if estimates is None or estimates[low_key] is None or estimates[high_key] is None:
                continue
            seconds = estimates[key]
            slopes = slopes_between(closed[key], [other[key] for other in others])
            low, high = self.fit.range(metric, slopes, estimates[low_key] / seconds, estimates[high_key] / seconds)
            estimates[low_key], estimates[high_key] = seconds * low, seconds * high
            if part is not None:
                estimates[f"{metric}_judged_seconds"] = seconds * judged_factor(high, estimates["confidence"])
            if metric == "tpot":
                estimates["tokens_per_second_low"] = estimates["tokens_per_second"] / high
                estimates["tokens_per_second_high"] = estimates["tokens_per_second"] / low
        document["low_seconds"] = max(document["low_seconds"] or 0.0, document["roofline_decode_step_seconds"])
