"""Runs of a benchmark as times for a fit, and what the documents say about the fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import exp
from statistics import mean
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import UsageError
from kvcalc.planning.answers.throughput import describe_speed, in_short_form
from kvcalc.planning.calibration.measured import compared_seconds, predicted_seconds
from kvcalc.records import NamedTuple
from kvcalc.server.budget import budget
from kvcalc.server.case import Case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.bench_results import Point
from kvcalc.throughput.factor_fit import Fit, Observation
from kvcalc.throughput.factors import Factors, scaled

if TYPE_CHECKING:
    import kvcalc.documents as documents

# 80 % of a normal distribution is within this many spreads.
_EIGHTY_PERCENT = 1.2816


class Run(NamedTuple):
    """One run of a benchmark, and the file that has it."""

    file: str
    point: Point


class Observed(NamedTuple):
    """One measured time of a run, for the fit."""

    run: Run
    observation: Observation


def observe(
    run: Run, number: int, case: Case, with_record: Callable[[Speed], Speed] = lambda speed: speed
) -> list[Observed]:
    """The times of a run and how they are predicted. Raises UsageError (exit 2) if its speed is not known."""
    speed, room = speed_of(without_calibration(case), []), budget(case)
    if isinstance(speed, str):
        raise UsageError(f"no prediction: {speed}")
    if not isinstance(room, str) and room.running_limit() == 0:
        raise UsageError("no prediction: it does not fit in memory")
    base = with_record(speed)

    short = in_short_form(case)

    # The fit asks for one metric after another with the same factors: those of a point and its neighbours.
    @lru_cache(maxsize=2 * len(Factors._fields))
    def described(factors: Factors) -> documents.Throughput:
        return describe_speed(short, with_factors(base, factors), [])

    simulated, unchanged = describe_speed(case, base, []), described(Factors())
    if simulated["serving"] is None:  # its requests do not run
        simulated = unchanged

    def predictor(metric: str) -> Callable[[Factors], float]:
        # What the short form is off by hardly depends on the factors.
        ratio = predicted_seconds(simulated, metric) / predicted_seconds(unchanged, metric)
        return lambda factors: ratio * predicted_seconds(described(factors), metric)

    return [
        Observed(run, Observation(number, time.metric, compared_seconds(time), predictor(time.metric)))
        for time in run.point.times
    ]


def without_calibration(case: Case) -> Case:
    """The same case with the constants that are fitted for its engine."""
    speed = case.question.speed
    if speed is None or speed.calibration is None:
        return case
    return case._replace(question=case.question._replace(speed=speed._replace(calibration=None)))


def with_factors(speed: Speed, factors: Factors) -> Speed:
    """The speed with constants multiplied by the factors."""
    return speed._replace(model=scaled(speed.model, factors))


def describe_fit(found: Fit | None, observed: Sequence[Observed]) -> documents.Explained:
    """The factors of a fit, and every time before and after it."""
    residuals: list[documents.ExplainedResidualsItem] = [] if found is None else [
        {
            "file": seen.run.file,
            "run": seen.run.point.run,
            "metric": cast(Any, seen.observation.metric),
            "measured_seconds": seen.observation.measured_seconds,
            "uncalibrated_seconds": fitted.before_seconds,
            "calibrated_seconds": fitted.after_seconds,
            "left_out_seconds": fitted.left_out_seconds,
        }
        for seen, fitted in zip(observed, found.times)
    ]  # fmt: skip
    return {
        "runs": len({seen.observation.run for seen in observed}),
        "factors": [] if found is None else [_describe_factor(found, name) for name in Factors._fields],
        "errors": [
            _errors(metric, residuals) for metric in dict.fromkeys(seen.observation.metric for seen in observed)
        ],
        "residuals": residuals,
    }


def _describe_factor(fitted: Fit, name: str) -> documents.ExplainedFactorsItem:
    factor, width = getattr(fitted.factors, name), exp(_EIGHTY_PERCENT * fitted.spread(name))
    return {
        "name": cast(Any, name),
        "factor": factor,
        "low_factor": factor / width,
        "high_factor": factor * width,
        "changed": name in fitted.changed,
    }


def _errors(metric: str, residuals: Sequence[documents.ExplainedResidualsItem]) -> documents.ExplainedErrorsItem:
    """The mean absolute errors of one metric, before and after the fit, and for runs left out of it."""
    rows = [row for row in residuals if row["metric"] == metric]

    return {
        "metric": cast(Any, metric),
        "times": len(rows),
        "uncalibrated_mean_error": mean_error(rows, "uncalibrated_seconds") or 0.0,
        "mean_error": mean_error(rows, "calibrated_seconds") or 0.0,
        "left_out_mean_error": mean_error(rows, "left_out_seconds"),
    }


def mean_error(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The mean absolute error of the times at `key`. None if one of them is not known."""
    errors = [abs(row[key] / row["measured_seconds"] - 1) for row in rows if row[key] is not None]
    return float(mean(errors)) if len(errors) == len(rows) else None
