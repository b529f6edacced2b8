"""Fits the factors on an engine's constants to a few measured times.

The result is the most probable one: each factor has a log-normal prior around 1, and each time a log-normal error. The
solver is Gauss-Newton on the logarithms. A soft L1 loss limits the weight of one bad run.

Only factors that the times determine are changed. The spread of a prediction comes from all factors, because those
that are not determined may still be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log, sqrt

from kvcalc.records import NamedTuple
from kvcalc.throughput.factors import PRIOR_SPREAD, Factors

NOISE = {"tpot": 0.09, "decode": 0.09, "prefill": 0.2, "ttft": 0.35}
"""The spread of a time's logarithm that no factor explains. Published points of one release, model, device and type of
weights differ by 9 % from a fit of their own. Prefills differ more, and times to the first token most, because they
depend on queues."""

# A factor is determined if the times reduce its spread to less than this share of the prior's. With a lower share,
# fewer factors change, and other runs of the same server are predicted worse (benchmarks/score/calibrate.py).
_DETERMINED = 0.9
_Vector = list[float]
_Matrix = list[list[float]]
_NAMES = Factors._fields
_ALL = tuple(range(len(_NAMES)))
_PRECISION = [1 / spread**2 for spread in PRIOR_SPREAD]
_STEP = 0.01
_MOST_ITERATIONS = 12
_CONVERGED = 1e-4
# The weight of the assumed noise, in residuals.
_NOISE_COUNTS = 4
# 80 % of a normal distribution is within this many spreads.
_EIGHTY_PERCENT = 1.2816


class Observation(NamedTuple):
    """A measured time in seconds, and its prediction with given factors. Times of one run have the same `run`."""

    run: int
    metric: str
    measured_seconds: float
    predict: Callable[[Factors], float]


class Fitted(NamedTuple):
    """One time before and after the fit, and with the factors that follow from the other runs (None if too few)."""

    before_seconds: float
    after_seconds: float
    left_out_seconds: float | None


class Fit(NamedTuple):
    """The factors, the names of those that were changed, and the covariance of the logarithms of all factors.

    `noise` multiplies the spreads in `NOISE`; it is at least 1. `times` are in the order of the observations.
    """

    factors: Factors
    changed: tuple[str, ...]
    covariance: _Matrix
    noise: float
    times: tuple[Fitted, ...]

    def only(self, names: Sequence[str], observations: Sequence[Observation]) -> Fit:
        """The fit with the other factors at 1, for a question to which only these carry over."""
        changed = tuple(name for name in self.changed if name in names)
        factors = Factors(**{name: getattr(self.factors, name) for name in changed})
        times = (Fitted(t.before_seconds, seen.predict(factors), None) for t, seen in zip(self.times, observations))
        return self._replace(factors=factors, changed=changed, times=tuple(times))

    def spread(self, name: str) -> float:
        """The spread of the logarithm of a factor."""
        place = _NAMES.index(name)
        return sqrt(self.covariance[place][place])

    def range(self, metric: str, slopes: Sequence[float], low: float, high: float) -> tuple[float, float]:
        """The ends of a prediction's 80 % range, as factors on it. `low` and `high` are those without a calibration.

        `slopes` are the changes of the prediction's logarithm with the logarithm of each factor. The range is only
        wider than before if the runs themselves lie further from the fit than that.
        """
        noise = NOISE[metric] * self.noise
        variance = sum(a * b * self.covariance[i][j] for i, a in enumerate(slopes) for j, b in enumerate(slopes))
        half, before = _EIGHTY_PERCENT * sqrt(max(0.0, variance) + noise**2), log(high / low) / 2
        if half >= before:
            half = _EIGHTY_PERCENT * noise
            if half <= before or self.noise <= 1:
                return low, high
        return exp(-half), exp(half)


def fit(observations: Sequence[Observation], least_noise: float = 1.0) -> Fit:
    """The factors that the observations determine. The noise is at least `least_noise` times that in `NOISE`."""
    problem = _Problem(observations, least_noise)
    start = [0.0] * len(_NAMES)
    factors = problem.solve(start, _ALL, least_noise)
    noise = problem.noise(factors)
    active = problem.determined(factors, noise)
    factors = problem.solve([value if i in active else 0.0 for i, value in enumerate(factors)], active, noise)
    # The noise may have changed: the residuals of the reduced fit are larger.
    noise = problem.noise(factors)
    factors = problem.solve(factors, active, noise)
    information = problem.information(factors, _ALL, noise)
    before, after = problem.predicted(start), problem.predicted(factors)
    left_out = problem.left_out(factors, active, noise)
    return Fit(
        _factors(factors),
        tuple(_NAMES[i] for i in active),
        _inverse(information),
        noise,
        tuple(map(Fitted, before, after, left_out)),
    )


def slopes_of(predict: Callable[[Factors], float], at: Factors = Factors()) -> _Vector:
    """The change of a prediction's logarithm with the logarithm of each factor."""
    here = log(predict(at))
    return [(log(predict(near)) - here) / _STEP for near in neighbours(at)]


def neighbours(at: Factors = Factors()) -> list[Factors]:
    """The factors with each of them increased by a small step in turn, for `slopes_between`."""
    return [at._replace(**{name: getattr(at, name) * exp(_STEP)}) for name in _NAMES]


def slopes_between(here: float, near: Sequence[float]) -> _Vector:
    """The slopes of a figure, from its value and its values at the `neighbours`."""
    return [(log(value) - log(here)) / _STEP for value in near]


class _Problem:
    """The observations, with the residuals and slopes at the last point asked for."""

    def __init__(self, observations: Sequence[Observation], least_noise: float) -> None:
        self._observations, self._least_noise = observations, least_noise
        self._spreads = [NOISE[seen.metric] for seen in observations]
        self._known: tuple[_Vector, _Vector, _Matrix] | None = None

    def predicted(self, at: _Vector) -> _Vector:
        factors = _factors(at)
        return [seen.predict(factors) for seen in self._observations]

    def residuals(self, at: _Vector) -> _Vector:
        """The logarithms of measured / predicted."""
        return [log(seen.measured_seconds / p) for seen, p in zip(self._observations, self.predicted(at))]

    def _linear(self, at: _Vector) -> tuple[_Vector, _Matrix]:
        """The residuals, and the slopes of the predictions, by observation."""
        if self._known is None or self._known[0] != at:
            factors = _factors(at)
            slopes = [slopes_of(seen.predict, factors) for seen in self._observations]
            self._known = ([*at], self.residuals(at), slopes)
        return self._known[1:]

    def _weights(self, residuals: _Vector, noise: float) -> _Vector:
        """The weight of each squared residual under a soft L1 loss, divided by its variance."""
        return [
            1 / sqrt(1 + (residual / (spread * noise)) ** 2) / (spread * noise) ** 2
            for residual, spread in zip(residuals, self._spreads)
        ]

    def _loss(self, at: _Vector, noise: float) -> float:
        fits = sum(
            2 * (sqrt(1 + (residual / (spread * noise)) ** 2) - 1)
            for residual, spread in zip(self.residuals(at), self._spreads)
        )
        return fits + sum(p * value**2 for p, value in zip(_PRECISION, at))

    def information(self, at: _Vector, active: Sequence[int], noise: float, without: int | None = None) -> _Matrix:
        """The inverse of the covariance of the active factors, optionally without one run."""
        residuals, slopes = self._linear(at)
        matrix = [[_PRECISION[i] if i == j else 0.0 for j in active] for i in active]
        for seen, weight, slope in zip(self._observations, self._weights(residuals, noise), slopes):
            if seen.run == without:
                continue
            for row, i in zip(matrix, active):
                for place, j in enumerate(active):
                    row[place] += weight * slope[i] * slope[j]
        return matrix

    def solve(self, at: _Vector, active: Sequence[int], noise: float) -> _Vector:
        """The most probable logarithms of the active factors. The others stay at 0."""
        loss = self._loss(at, noise)
        for _ in range(_MOST_ITERATIONS if active else 0):
            step = _solution(self.information(at, active, noise), self._gradient(at, active, noise))
            for _ in range(6):
                new = [*at]
                for i, change in zip(active, step):
                    new[i] += change
                new_loss = self._loss(new, noise)
                if new_loss <= loss:
                    break
                step = [change / 2 for change in step]
            else:
                return at
            at, loss = new, new_loss
            if max(map(abs, step)) < _CONVERGED:
                break
        return at

    def _gradient(self, at: _Vector, active: Sequence[int], noise: float, without: int | None = None) -> _Vector:
        residuals, slopes = self._linear(at)
        weighted = [
            0.0 if seen.run == without else weight * residual
            for seen, weight, residual in zip(self._observations, self._weights(residuals, noise), residuals)
        ]
        return [sum(w * slope[i] for w, slope in zip(weighted, slopes)) - _PRECISION[i] * at[i] for i in active]

    def noise(self, at: _Vector) -> float:
        """The factor on the assumed noise that explains the residuals, at least the one given.

        The assumption counts as much as a few residuals. A soft weight limits those of bad runs.
        """
        squares = [(r / spread) ** 2 for r, spread in zip(self.residuals(at), self._spreads)]
        limited = [square / sqrt(1 + square / 4) for square in squares]
        return max(self._least_noise, sqrt((_NOISE_COUNTS + sum(limited)) / (_NOISE_COUNTS + len(limited))))

    def determined(self, at: _Vector, noise: float) -> tuple[int, ...]:
        """The factors that the observations determine together: the least determined one is dropped first."""
        active = list(_ALL)
        while active:
            covariance = _inverse(self.information(at, active, noise))
            shares = [sqrt(covariance[k][k] * _PRECISION[i]) for k, i in enumerate(active)]
            if max(shares) < _DETERMINED:
                break
            del active[shares.index(max(shares))]
        return tuple(active)

    def left_out(self, at: _Vector, active: Sequence[int], noise: float) -> list[float | None]:
        """Each observation predicted without its own run, by one Gauss-Newton step from the fit of all runs."""
        runs = list(dict.fromkeys(seen.run for seen in self._observations))
        if len(runs) < LEAST_RUNS:
            return [None] * len(self._observations)
        without: dict[int, Factors] = {}
        for run in runs:
            new = [*at]
            if active:
                matrix = self.information(at, active, noise, run)
                for i, change in zip(active, _solution(matrix, self._gradient(at, active, noise, run))):
                    new[i] += change
            without[run] = _factors(new)
        return [seen.predict(without[seen.run]) for seen in self._observations]


LEAST_RUNS = 3
"""With fewer runs, no run is left out to see how well the others predict it."""


def _factors(logarithms: _Vector) -> Factors:
    return Factors(*map(exp, logarithms))


def _solution(matrix: _Matrix, vector: _Vector) -> _Vector:
    """The solution of a small system with a positive definite matrix (Gauss-Jordan, no pivots needed)."""
    rows = [[*row, value] for row, value in zip(matrix, vector)]
    for k, pivot in enumerate(rows):
        scale = pivot[k]
        pivot[:] = [value / scale for value in pivot]
        for other in rows:
            if other is not pivot and other[k]:
                by = other[k]
                other[:] = [a - by * b for a, b in zip(other, pivot)]
    return [row[-1] for row in rows]


def _inverse(matrix: _Matrix) -> _Matrix:
    size = len(matrix)
    return [_solution(matrix, [float(i == j) for j in range(size)]) for i in range(size)]
