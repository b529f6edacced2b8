"""Times of a load that goes on: without its warm-up, and long enough that they are known."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.simulation.loads.load import MEANS_AND_P99
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.settled import warm_up, width_of_mean, width_of_percentile, window_of
from tests.conftest import at_night

pytestmark = pytest.mark.settled

MODEL, DEVICE = "llama-3.1-8b", "h100"
VARYING: dict[str, Any] = {"prompt_tokens": "lognormal:1500,0.3", "answer_tokens": "lognormal:100,0.3"}


def times(document: Any, metric: str) -> dict[str, float]:
    (row,) = [row for row in document["times"] if row["metric"] == metric]
    return {name.removesuffix("_seconds"): value for name, value in row.items() if name != "metric"}


def test_a_plan_for_clients_is_not_one_for_the_start_of_all() -> None:
    """With 20 requests of each client, the first ones are 5 % of all: a plan for them had 30 devices."""
    asked: dict[str, Any] = {
        "input_tokens": 1500, "output_tokens": 60, "concurrency": 30, "max_ttft_seconds": 0.15, "ttft_percentile": 99,
    }  # fmt: skip
    by_itself, long = (
        kvcalc.plan(MODEL, [DEVICE], requests=requests, **asked)["plans"][0]["num_devices"] for requests in (None, 6000)
    )
    assert by_itself is not None
    assert long is not None
    # A percentile that is known to 10 % may need the next larger layout.
    assert 0.6 * long <= by_itself <= 1.6 * long


def test_so_is_a_limit_on_a_mean() -> None:
    """The short form judges what clients wait for after their first request."""
    asked: dict[str, Any] = {"input_tokens": 4000, "output_tokens": 300, "concurrency": 64}
    (row,) = kvcalc.plan(MODEL, [DEVICE], max_ttft_seconds=2.0, confidence=50, **asked)["plans"]
    found = kvcalc.simulate(
        MODEL, DEVICE, prompt_tokens="uniform:2800..5200", answer_tokens="uniform:210..390", concurrency=64,
        replicas=row["replicas"], tensor_parallel_size=row["tensor_parallel_size"], router="random",
    )  # fmt: skip
    assert row["ttft_seconds"] == pytest.approx(times(found, "ttft")["mean"], rel=0.15)


@pytest.mark.parametrize("engine", ["vllm", at_night("sglang"), at_night("tensorrt-llm"), at_night("llama.cpp")])
def test_the_warm_up_does_not_count_unless_it_is_a_benchmark(engine: str) -> None:
    asked: dict[str, Any] = {"engine": engine, "concurrency": 32, **VARYING}
    steady, long, benchmark = (
        kvcalc.simulate(MODEL, DEVICE, **asked, **more) for more in ({}, {"requests": 12_000}, {"benchmark": True})
    )
    for document in (steady, long):
        results = document["results"]
        assert results["requests"] / 2 <= results["counted_requests"] < results["requests"]
        assert not document["load"]["is_benchmark"]
    for metric, share in (("ttft", 0.06), ("tpot", 0.03), ("e2e", 0.03)):
        assert times(steady, metric)["mean"] == pytest.approx(times(long, metric)["mean"], rel=share)
    assert times(steady, "ttft")["p99"] == pytest.approx(times(long, "ttft")["p99"], rel=0.2)
    assert steady["results"]["tokens_per_second"] == pytest.approx(long["results"]["tokens_per_second"], rel=0.03)
    results = benchmark["results"]
    assert results["requests"] == results["counted_requests"] == 15 * 32
    assert benchmark["load"]["is_benchmark"]
    assert times(benchmark, "ttft")["p99"] > 1.5 * times(long, "ttft")["p99"]


def test_a_rate_is_simulated_until_its_times_no_longer_move() -> None:
    """A busy server's queue moves for long: 1,000 requests say little."""
    asked: dict[str, Any] = {"requests_per_second": 4.7, **VARYING}
    short, settled, long = (kvcalc.simulate(MODEL, "l40s", requests=number, **asked) for number in (1000, None, 30_000))
    assert settled["results"]["requests"] > 1000
    errors = [abs(times(document, "ttft")["mean"] / times(long, "ttft")["mean"] - 1) for document in (short, settled)]
    assert errors[1] < 0.1
    assert errors[1] < errors[0]


def test_a_run_whose_times_do_not_become_known_says_so_and_one_that_does_not_keep_up_ends() -> None:
    found = kvcalc.simulate(MODEL, "l40s", requests_per_second=5.25, **VARYING)
    texts = [note["text"] for note in found["warnings"] if note["code"] == "unsettled"]
    if found["results"]["keeps_up"] and found["results"]["requests"] == 16_000:
        assert texts[0].endswith("kvcalc simulate --requests 32000 follows more")
    overloaded = kvcalc.simulate(MODEL, "l40s", requests_per_second=12.0, **VARYING)
    assert not overloaded["results"]["keeps_up"]
    assert overloaded["results"]["requests"] == 1000
    assert {note["code"] for note in overloaded["warnings"]} == {"not-fitted"}


def answered(ttft: float, number: int) -> Request:
    request = Request(number, float(number), 10, 11)
    request.first_token, request.finish = number + ttft, number + ttft + 1
    return request


def test_the_warm_up_ends_where_times_no_longer_fall() -> None:
    """MSER-5: the first times are longer, and the others vary around a mean."""
    draw = Random(1)
    later = [draw.gauss(1.0, 0.2) for _ in range(900)]
    assert 95 <= warm_up([*(draw.gauss(5.0, 1.0) for _ in range(100)), *later]) <= 120
    assert warm_up(later) <= 450
    # Of times that grow without end, the last half is left.
    assert warm_up([float(at) for at in range(1000)]) == 500
    assert warm_up([1.0] * 1000) == 0
    assert warm_up([1.0, 2.0]) == 0


@pytest.mark.parametrize("number", [400, 4000])
def test_an_interval_has_the_mean_in_95_of_100_cases(number: int) -> None:
    inside = 0
    for seed in range(200):
        draw = Random(seed)
        values = [draw.expovariate(1.0) for _ in range(number)]
        inside += abs(sum(values) / number - 1) <= width_of_mean(values) * sum(values) / number
    assert 180 <= inside <= 198


def test_times_that_depend_on_each_other_have_a_wider_interval() -> None:
    draw, value = Random(3), 0.0
    alone, after = list[float](), list[float]()
    for _ in range(4000):
        value = 0.9 * value + draw.gauss(0, 1)
        after.append(20 + value)
        alone.append(20 + draw.gauss(0, 1 / (1 - 0.81) ** 0.5))
    assert width_of_mean(after) > 2.5 * width_of_mean(alone)
    assert width_of_percentile(after, 0.99) > 1.3 * width_of_percentile(alone, 0.99)


def test_too_few_times_are_not_known() -> None:
    few = [answered(0.5 + number / 100, number) for number in range(15)]
    assert window_of(few, MEANS_AND_P99).widest == inf
    # 99 % of 40 times: the interval goes beyond all of them.
    assert width_of_percentile([float(number) for number in range(40)], 0.99) == inf
    same = [answered(0.5, number) for number in range(400)]
    assert window_of(same, MEANS_AND_P99).widest == pytest.approx(0, abs=1e-9)
    single = [Request(number, 0.0, 10, 1) for number in range(100)]
    for request in single:
        request.first_token = request.finish = 1.0
    assert window_of(single, [("tpot", None)]).widest == 0


def test_both_pools_leave_out_the_warm_up_too() -> None:
    asked: dict[str, Any] = {"prefill_replicas": 2, "transfer": "infiniband-400g", "concurrency": 16, **VARYING}
    steady, benchmark = (kvcalc.simulate(MODEL, DEVICE, **asked, benchmark=counts) for counts in (False, True))
    assert steady["results"]["counted_requests"] < steady["results"]["requests"]
    assert benchmark["results"]["counted_requests"] == benchmark["results"]["requests"] == 240
    assert times(steady, "ttft")["max"] < times(benchmark, "ttft")["max"]


def test_the_screen_says_what_does_not_count(kvcalc: Any) -> None:
    base = (
        "simulate llama-3.1-8b --gpu h100 --concurrency 4 --input-tokens 100 --output-tokens 20 --requests 100"
    ).split()
    assert "times leave out the warm-up, the first " in kvcalc(*base).out
    out = kvcalc(*base, "--benchmark").out
    assert "as a benchmark" in out
    assert "warm-up" not in out
