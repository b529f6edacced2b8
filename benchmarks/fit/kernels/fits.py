"""Fit the seconds of a kernel to its bytes and operations, and summarise scattered measurements.

Two forms are fitted. The first is kvcalc's roofline: fixed + (read^p + compute^p)^(1/p), with p = 1 for a sum and a
large p for the larger of the two. The second is a plain sum: fixed + the sum of factor * term. In both, the errors are
those of the logarithm, and outliers count less than the square of their error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MINIMUM_ROWS = 20
# A fit needs no more rows than this; the tables have up to 100,000.
_MOST_ROWS = 6000
# Errors of the logarithm above this count less than their square.
_SCALE = 0.1
_FIXED = (1e-7, 2e-3)
# A kernel that reads at the nominal rate or computes at the nominal peak has the factor 1. Lower factors mean that a
# table repeats data which stay in the L2 cache, so such fits stop at 1.
_FACTOR = (1.0, 30.0)
_POWER = (1.0, 8.0)


class Fit(NamedTuple):
    """The constants of a form, and how far the rows are from it.

    `factors` multiply the ideal seconds of each term. A factor is None if its term is never a large part of the time,
    because the rows then do not determine it. `spread` is the median of |log(measured / fitted)|, `wide_spread` its
    90th percentile.
    """

    fixed_seconds: float
    factors: tuple[float | None, ...]
    power: float | None
    spread: float
    wide_spread: float
    rows: int


def fit_roofline(seconds: Array, read: Array, compute: Array) -> Fit | None:
    """The roofline that explains `seconds` best. None if there are fewer than MINIMUM_ROWS rows.

    `read` and `compute` are ideal seconds: bytes / nominal bandwidth and operations / nominal peak.
    """
    rows = _usable(seconds)
    if len(rows) < MINIMUM_ROWS:
        return None
    seconds, read, compute = seconds[rows], read[rows], compute[rows]

    def terms(logs: Array) -> tuple[Array, Array]:
        return np.exp(logs[1]) * read, np.exp(logs[2]) * compute

    def off(logs: Array) -> Array:
        slow, fast = terms(logs)
        longer, shorter = np.maximum(slow, fast), np.minimum(slow, fast)
        power = np.exp(logs[3])
        joined = longer * (1 + (shorter / np.maximum(longer, 1e-15)) ** power) ** (1 / power)
        return np.log((np.exp(logs[0]) + joined) / seconds)

    bounds = [_FIXED, _FACTOR, _FACTOR, _POWER]
    logs = _solve(off, [float(np.quantile(seconds, 0.02)), 1.3, 1.6, 2.0], bounds)
    factors = _determined(np.exp(logs[1:3]), terms(logs), seconds)
    power = float(np.exp(logs[3])) if None not in factors else None
    return _fit(logs, factors, power, np.abs(off(logs)))


def fit_sum(
    seconds: Array, terms: Sequence[Array], bounds: Sequence[tuple[float, float]] | None = None, share: float = 0.5
) -> Fit | None:
    """The sum that explains `seconds` best. None if there are fewer than MINIMUM_ROWS rows.

    `terms` are ideal seconds and `bounds` the lowest and highest factor of each. A factor is determined if its term is
    more than `share` of the measured time in some of the rows.
    """
    rows = _usable(seconds)
    if len(rows) < MINIMUM_ROWS:
        return None
    seconds = seconds[rows]
    columns = np.array([term[rows] for term in terms]).T
    limits = list(bounds or [_FACTOR] * len(terms))

    def off(logs: Array) -> Array:
        return np.log((np.exp(logs[0]) + columns @ np.exp(logs[1:])) / seconds)

    start = [float(np.quantile(seconds, 0.05)), *(float(np.sqrt(low * high)) for low, high in limits)]
    logs = _solve(off, start, [_FIXED, *limits])
    values = np.exp(logs[1:])
    factors = _determined(values, [value * column for value, column in zip(values, columns.T)], seconds, share)
    return _fit(logs, factors, None, np.abs(off(logs)))


def _fit(logs: Array, factors: tuple[float | None, ...], power: float | None, off: Array) -> Fit:
    fixed = float(np.exp(logs[0]))
    return Fit(fixed, factors, power, float(np.median(off)), float(np.quantile(off, 0.9)), len(off))


def _usable(seconds: Array) -> NDArray[np.int64]:
    """Rows with a time above 0, evenly thinned out to _MOST_ROWS."""
    rows = np.flatnonzero(np.isfinite(seconds) & (seconds > 0))
    return rows[:: max(1, len(rows) // _MOST_ROWS)]


def _determined(values: Array, terms: Sequence[Array], seconds: Array, share: float = 0.5) -> tuple[float | None, ...]:
    """A term determines its factor if it is more than `share` of the time in at least 5% of the rows."""
    return tuple(
        float(value) if np.quantile(term / seconds, 0.95) > share else None for value, term in zip(values, terms)
    )


def _solve(off: Callable[[Array], Array], start: Sequence[float], bounds: Sequence[tuple[float, float]]) -> Array:
    """The logarithms of the constants with the least robust error: Levenberg-Marquardt steps within the bounds."""
    low, high = (np.log([bound[side] for bound in bounds]) for side in (0, 1))
    logs = np.clip(np.log(start), low + 1e-3, high - 1e-3)
    error = off(logs)
    cost, damping = _cost(error), 1e-2
    for _ in range(200):
        slopes = np.array([(off(logs + step) - error) / 1e-5 for step in 1e-5 * np.eye(len(logs))]).T
        weights = 1 / np.sqrt(1 + (error / _SCALE) ** 2)
        gradient = slopes.T @ (weights * error)
        # A constant at a bound stays there if the error falls only beyond the bound.
        free = ~(((logs <= low) & (gradient > 0)) | ((logs >= high) & (gradient < 0)))
        if not free.any():
            break
        squares = (slopes[:, free] * weights[:, None]).T @ slopes[:, free]
        better = False
        while not better and damping < 1e8:
            step = np.zeros_like(logs)
            matrix = squares + damping * np.diag(np.diag(squares)) + 1e-9 * np.eye(int(free.sum()))
            step[free] = -np.linalg.solve(matrix, gradient[free])
            moved = np.clip(logs + step, low, high)
            moved_error = off(moved)
            better = _cost(moved_error) < cost
            damping = damping / 4 if better else damping * 4
        if not better:
            break
        gain = cost - _cost(moved_error)
        logs, error, cost = moved, moved_error, _cost(moved_error)
        if gain < 1e-7 * cost:
            break
    return logs


def _cost(error: Array) -> float:
    return float(np.sum(np.sqrt(1 + (error / _SCALE) ** 2) - 1))


def middle(values: Array, least: int = 5) -> float | None:
    """The median, or None if there are fewer than `least` values."""
    return quantile(values, 0.5, least)


def quantile(values: Array, share: float, least: int = 5) -> float | None:
    """The value that `share` of the values lie below, or None if there are fewer than `least` values."""
    values = values[np.isfinite(values)]
    return float(np.quantile(values, share)) if len(values) >= least else None


def rounded(value: Any, digits: int = 3) -> Any:
    """The same value with `digits` significant digits in every number, also in dictionaries and lists."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value
