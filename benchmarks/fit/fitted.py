"""Constants fitted to rows, and what they predict for these rows or for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.fit.arrays import Ask, Values, seconds_of, stacked_constants, ttft_seconds_of
from benchmarks.fit.parameters import LAPTOPS, SERVERS, Model
from benchmarks.fit.rows import ALL, FIRST, Row
from benchmarks.fit.simulated import Corrections, corrections
from kvcalc.throughput.constants import Constants

# The noise of a measured step and of a time to first token, as logarithms.
_NOISE, _TTFT_NOISE = 0.12, 0.2
_LEAST_WEIGHT = 1e-3
# A source, a family and an engine with more rows than this count as this many.
_MOST_ROWS = 60
# The weight of a time to first token that is not a mean: it tells waiting from the first steps of a server.
_NOT_MEAN = 1.5
# How often the corrections of the short form are renewed.
_ROUNDS = 3
# A time to first token is at least this share of that of the short form, whatever is added to it.
_LEAST_OF_SHORT = 0.1


def weights_of(rows: Sequence[Row], is_used: Callable[[Row], bool]) -> Values:
    """The weight of each row. Families with many rows do not count more. Suspect rows do not count."""
    groups = [(row.source, row.family, row.engine) for row in rows]
    many = Counter(groups)
    return np.array(
        [
            min(1.0, (_MOST_ROWS / many[group]) ** 0.5) if row.suspect is None and is_used(row)
            else _LEAST_WEIGHT for row, group in zip(rows, groups)
        ]
    )  # fmt: skip


Predicted = list[tuple[float, "float | None"]]


class Fitted:
    """The fitted constants, by engine, kind of device and release.

    The short form of a row, corrected by `correction`, is what the measured times are compared with (`simulated`).
    """

    def __init__(self, rows: Sequence[Row], correction: Corrections, start: Fitted | None = None) -> None:
        self.correction = correction
        self.models: dict[str, Model] = {}
        self.theta: dict[str, Values] = {}
        self.sizes: dict[str, int] = {}
        self._known: dict[tuple[str, ...], Constants] = {}
        for model in (SERVERS, LAPTOPS):
            own = [i for i, row in enumerate(rows) if row.engine in model.engines]
            self._fit(model, "", [rows[i] for i in own], correction.of(own), start)
            own = [i for i in own if rows[i].ttft_seconds]
            self._fit(model.first_token, "ttft", [rows[i] for i in own], correction.of(own), start)

    def _fit(self, model: Model, which: str, own: list[Row], correction: Corrections, start: Fitted | None) -> None:
        if not own:
            return
        key = model.name + which
        before = None if start is None else start.theta[key]
        self.sizes[key] = len(own)
        if start is not None and before is not None and start.sizes[key] == len(own):
            self.theta[key], self.models[key] = before, model  # none of its rows are left out
            return
        if which:
            ask = first_of(own, [self.constants_of(row) for row in own], correction)
            measured = [row.ttft_seconds or 1.0 for row in own]
            weights = weights_of(
                own, lambda row: row.running >= row.concurrency and not (row.has_equal_lengths or row.is_cold)
            )
            weights = weights * np.array([1.0 if row.requests == ALL else _NOT_MEAN for row in own])
        else:
            ask, measured = tpot_of(own, correction), [row.seconds for row in own]
            weights = weights_of(own, lambda row: row.requests != FIRST)
        self.theta[key] = most_probable(model, own, ask, np.log(measured), weights, before)
        self.models[key] = model

    def values(self, engine: str, labels: Sequence[str]) -> dict[str, Any]:
        """All constants of an engine for a kind of device and a release, which `labels` name."""
        found = model_of(engine).first_token.likely()
        for key, model in self.models.items():
            if engine in model.engines:
                found |= model.values(self.theta[key], engine, labels)
        return {name: found[name] for name in Constants._fields if name not in Constants._field_defaults}

    def constants_of(self, row: Row) -> Constants:
        labels = model_of(row.engine).labels_of(row)
        key = (str(len(self.models)), *labels)  # each fit adds constants
        if key not in self._known:
            self._known[key] = Constants(**self.values(row.engine, labels))
        return self._known[key]

    def predict(self, rows: Sequence[Row], correction: Corrections | None = None) -> Predicted:
        """The seconds that kvcalc predicts for the rows, and those to the first token if they are measured.

        `correction` is that of the rows, if it was fitted to others.
        """
        correction = correction or self.correction
        each = [self.constants_of(row) for row in rows]
        seconds = tpot_of(rows, correction)(stacked_constants(each))
        served = [i for i, row in enumerate(rows) if row.ttft_seconds]
        own = [each[i] for i in served]
        known: dict[int, float] = {}
        if own:
            first = first_of([rows[i] for i in served], own, correction.of(served))(stacked_constants(own))
            known = dict(zip(served, map(float, first)))
        return [(float(s), known.get(i)) for i, s in enumerate(seconds)]


def most_probable(
    model: Model, rows: Sequence[Row], ask: Ask, measured: Values, weights: Values, start: Values | None = None
) -> Values:
    """The most probable parameters: least squares of logarithms with priors, robust to outliers.

    Large residuals count less: the loss of a row is soft L1, 2 (sqrt(1 + r^2) - 1). The priors count as they are.
    """
    arrays = model.arrays_of(rows)
    mean, spread = model.prior
    noise = _TTFT_NOISE if model.is_first_token else _NOISE

    def residuals(theta: Values) -> Values:
        predicted = ask(arrays(theta))
        r = weights * (np.log(predicted) - measured) / noise
        soft = np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1))
        return np.concatenate([soft, (theta - mean) / spread])

    result = least_squares(residuals, mean if start is None else start, x_scale="jac", max_nfev=30, ftol=1e-6)
    return np.asarray(result.x)


def tpot_of(rows: Sequence[Row], correction: Corrections) -> Ask:
    """The corrected time per output token, or decode step, of every row."""
    short = seconds_of(rows)
    return lambda constants: correction.ratios * short(constants)


def first_of(rows: Sequence[Row], step: Sequence[Constants], correction: Corrections) -> Ask:
    """The corrected time to first token of every row, with the step's constants as they are in `step`."""
    short = ttft_seconds_of(rows, step)
    return lambda constants: np.maximum(short(constants) + correction.seconds, _LEAST_OF_SHORT * short(constants))


def model_of(engine: str) -> Model:
    """The fit that an engine's constants come from."""
    return SERVERS if engine in SERVERS.engines else LAPTOPS


def fitted_to(rows: Sequence[Row]) -> Fitted:
    """The constants fitted to all rows, with corrections that are renewed in each round and once more at the end."""
    each = [row.model.constants for row in rows]
    for _ in range(_ROUNDS):
        fitted = Fitted(rows, corrections(rows, each))
        each = [fitted.constants_of(row) for row in rows]
    fitted.correction = corrections(rows, each)
    return fitted


def left_out(rows: Sequence[Row], key: Callable[[Row], str], start: Fitted) -> Predicted:
    """The prediction for each row with constants fitted without all rows that have the same `key`.

    `start` is fitted to all rows.
    """
    predicted: Predicted = [(0.0, None)] * len(rows)
    for value in sorted({key(row) for row in rows}):
        kept = [i for i, row in enumerate(rows) if key(row) != value]
        out = [i for i, row in enumerate(rows) if key(row) == value]
        fitted = Fitted([rows[i] for i in kept], start.correction.of(kept), start)
        for i, seconds in zip(out, fitted.predict([rows[i] for i in out], start.correction.of(out))):
            predicted[i] = seconds
        print(f"  without {value}", flush=True)
    return predicted


def family_of(row: Row) -> str:
    return row.family


def device_of(row: Row) -> str:
    return row.model.gpu.name


def release_of(row: Row) -> str:
    return f"{row.engine}@{row.version or (row.date or '')[:7]}"
