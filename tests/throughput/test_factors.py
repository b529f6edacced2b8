"""The factors multiply the constants they name, and a fit of a few times recovers them."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log

import pytest

from kvcalc.throughput.constants import Constants, load_constants
from kvcalc.throughput.factor_fit import NOISE, Fit, Observation, fit, neighbours, slopes_between
from kvcalc.throughput.factors import OF_ENGINE, SCALED, Factors, scaled
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.serving import serve
from tests.throughput.conftest import MakeModel

LOADS = ((1, 1000, 1), (200, 1000, 8), (200, 1000, 64), (200, 4000, 16), (1000, 100, 128), (200, 8000, 32))


def test_every_factor_multiplies_constants_of_its_own() -> None:
    assert tuple(SCALED) == Factors._fields
    named = [name for names in SCALED.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= set(Constants._fields)
    assert {*OF_ENGINE} < {*Factors._fields}


def test_a_factor_changes_its_constants_and_no_others() -> None:
    constants, _ = load_constants("vllm", find_gpu("h100"))
    assert Factors().apply(constants) == constants
    changed = Factors(step=2.0, reading=0.1).apply(constants)
    assert changed.kernel_seconds == 2 * constants.kernel_seconds
    assert changed.sequence_seconds == constants.sequence_seconds
    # Nothing is read faster than the device can.
    assert changed.kv_overhead == 1
    assert set(changed.weight_overhead.values()) == {1.0}
    slower = Factors(reading=2.0).apply(constants)
    assert slower.weight_overhead["bf16"] == 2 * constants.weight_overhead["bf16"]


@pytest.mark.parametrize("name", Factors._fields)
def test_each_factor_slows_some_load(model_of: MakeModel, name: str) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    slower = scaled(model, Factors()._replace(**{name: 1.5}))
    seconds = ttft if name == "waiting" else tpot
    assert any(seconds(slower, load) > 1.01 * seconds(model, load) for load in LOADS)
    assert all(seconds(slower, load) >= seconds(model, load) for load in LOADS)


def tpot(model: SpeedModel, load: tuple[int, int, int]) -> float:
    output, prompt, concurrency = load
    return serve(model, prompt, output, concurrency, concurrency).tpot_seconds


def ttft(model: SpeedModel, load: tuple[int, int, int]) -> float:
    output, prompt, concurrency = load
    return serve(model, prompt, output, concurrency, concurrency).ttft_seconds


def predictor(model: SpeedModel, load: tuple[int, int, int]) -> Callable[[Factors], float]:
    return lambda factors: tpot(scaled(model, factors), load)


def measured(model: SpeedModel, true: Factors, noise: tuple[float, ...] = ()) -> list[Observation]:
    """TPOT of a server whose constants differ from the model's by the factors `true`."""
    extra = noise or (1.0,) * len(LOADS)
    return [
        Observation(run, "tpot", predictor(model, load)(true) * by, predictor(model, load))
        for run, (load, by) in enumerate(zip(LOADS, extra))
    ]


def errors(found: Fit, observations: list[Observation]) -> list[float]:
    return [abs(seen.predict(found.factors) / seen.measured_seconds - 1) for seen in observations]


TRUE = (
    Factors(), Factors(step=1.6), Factors(prefill=0.6), Factors(communication=2.0), Factors(reading=1.3),
    Factors(step=0.6, prefill=1.7), Factors(sequence=3.0, reading=0.9),
)  # fmt: skip


@pytest.mark.parametrize("true", TRUE)
def test_the_fit_recovers_what_the_times_say(model_of: MakeModel, true: Factors) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    observations = measured(model, true)
    found = fit(observations)
    assert max(errors(found, observations)) < 0.06
    for name in found.changed:
        # Some factors have similar effects, so each one is only known within its spread.
        assert abs(log(getattr(found.factors, name) / getattr(true, name))) < 1.5 * found.spread(name)
    assert all(getattr(found.factors, name) == 1 for name in set(Factors._fields) - {*found.changed})
    assert found.noise == pytest.approx(1, abs=0.05)


def test_a_factor_that_no_time_depends_on_keeps_its_value(model_of: MakeModel) -> None:
    found = fit(measured(model_of("llama-3-8b"), Factors(step=1.5)))
    assert found.factors.communication == 1
    assert "communication" not in found.changed
    assert "step" in found.changed


def test_times_to_the_first_token_determine_the_waiting(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    true = Factors(waiting=2.0)

    def first(load: tuple[int, int, int]) -> Callable[[Factors], float]:
        return lambda factors: ttft(scaled(model, factors), load)

    waits = [Observation(run, "ttft", first(load)(true), first(load)) for run, load in enumerate(LOADS)]
    found = fit([*measured(model, true), *waits])
    assert "waiting" in found.changed
    assert abs(log(found.factors.waiting / true.waiting)) < 1.5 * found.spread("waiting")
    before, after = ([abs(log(s.predict(f) / s.measured_seconds)) for s in waits] for f in (Factors(), found.factors))
    assert sum(after) < 0.3 * sum(before)


def test_one_run_moves_the_prediction_most_of_the_way(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    (one, *_) = measured(model, Factors(step=1.8, reading=1.2))
    found = fit([one])
    assert abs(log(one.predict(found.factors) / one.measured_seconds)) < 0.3 * abs(
        log(one.predict(Factors()) / one.measured_seconds)
    )
    assert found.times[0].left_out_seconds is None


def test_one_bad_run_does_not_decide(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    observations = measured(model, Factors(step=1.3), (1.0, 1.0, 5.0, 1.0, 1.0, 1.0))
    found = fit(observations)
    good = [error for i, error in enumerate(errors(found, observations)) if i != 2]
    assert max(good) < 0.2
    assert found.noise > 1.5


def test_a_run_left_out_is_predicted_by_the_others(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    observations = measured(model, Factors(step=1.4, reading=1.2), (1.05, 0.95, 1.0, 1.05, 0.97, 1.0))
    found = fit(observations)
    for place, fitted in enumerate(found.times):
        others = fit([seen for seen in observations if seen.run != place])
        assert fitted.left_out_seconds == pytest.approx(observations[place].predict(others.factors), rel=0.05)


def test_the_range_shrinks_with_runs_and_never_below_the_noise(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    observations = measured(model, Factors(step=1.2))
    low, high = 0.6, 1.7
    before = log(high / low)
    widths = []
    for runs in (1, 3, 6):
        found = fit(observations[:runs])
        predict = observations[2].predict
        slopes = slopes_between(predict(found.factors), [predict(near) for near in neighbours(found.factors)])
        ends = found.range("tpot", slopes, low, high)
        widths.append(log(ends[1] / ends[0]))
    assert before > widths[0] > widths[1] > widths[2] > 2 * 1.28 * NOISE["tpot"]
    assert fit(observations).range("tpot", [0.0] * len(Factors._fields), 0.95, 1.05) == (0.95, 1.05)


def test_runs_that_contradict_each_other_widen_the_range(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", "h100", tensor_parallel_size=4)
    slow, fast = (measured(model, Factors(), (by,) * len(LOADS)) for by in (2.0, 0.5))
    found = fit([*slow, *(seen._replace(run=seen.run + len(LOADS)) for seen in fast)])
    low, high = found.range("tpot", [0.0] * len(Factors._fields), 0.9, 1.1)
    assert low < exp(-0.2)
    assert high > exp(0.2)
