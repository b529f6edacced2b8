"""Times of a load that goes on: without the first request of each client, and long enough that they no longer move."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.results import counted
from kvcalc.simulation.settled import largest_move
from tests.conftest import at_night

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
    # The shorter run may need a little more.
    assert 0.9 * long <= by_itself <= 1.3 * long


def test_so_is_a_limit_on_a_mean() -> None:
    """The closed form judges what clients wait for after their first request."""
    asked: dict[str, Any] = {"input_tokens": 4000, "output_tokens": 300, "concurrency": 64}
    (row,) = kvcalc.plan(MODEL, [DEVICE], max_ttft_seconds=2.0, confidence=50, **asked)["plans"]
    found = kvcalc.simulate(
        MODEL, DEVICE, prompt_tokens="uniform:2800..5200", answer_tokens="uniform:210..390", concurrency=64,
        replicas=row["replicas"], tensor_parallel_size=row["tensor_parallel_size"], router="random",
    )  # fmt: skip
    assert row["ttft_seconds"] == pytest.approx(times(found, "ttft")["mean"], rel=0.15)


@pytest.mark.parametrize("engine", ["vllm", at_night("sglang"), at_night("tensorrt-llm"), at_night("llama.cpp")])
def test_the_first_request_of_each_client_does_not_count_unless_it_is_a_benchmark(engine: str) -> None:
    asked: dict[str, Any] = {"engine": engine, "concurrency": 32, **VARYING}
    steady, long, benchmark = (
        kvcalc.simulate(MODEL, DEVICE, **asked, **more) for more in ({}, {"requests": 12_000}, {"benchmark": True})
    )
    for document in (steady, long):
        results = document["results"]
        assert results["counted_requests"] == results["requests"] - 32
        assert not document["load"]["is_benchmark"]
        assert results["steady_ttft_seconds"] == pytest.approx(times(document, "ttft")["mean"])
    for metric, share in (("ttft", 0.06), ("tpot", 0.03), ("e2e", 0.03)):
        assert times(steady, metric)["mean"] == pytest.approx(times(long, metric)["mean"], rel=share)
    assert times(steady, "ttft")["p99"] == pytest.approx(times(long, "ttft")["p99"], rel=0.2)
    results = benchmark["results"]
    assert results["requests"] == results["counted_requests"] == 15 * 32
    assert benchmark["load"]["is_benchmark"]
    assert times(benchmark, "ttft")["p99"] > 1.5 * times(long, "ttft")["p99"]


def test_clients_without_a_second_request_count() -> None:
    found = kvcalc.simulate(MODEL, DEVICE, prompt_tokens=100, answer_tokens=10, concurrency=8, requests=8)
    assert found["results"]["counted_requests"] == 8


def test_all_requests_count_that_arrive_at_a_rate_or_run_alone() -> None:
    requests = [Request(number, float(number), 10, 10) for number in range(4)]
    assert list(counted(requests, Load(concurrency=1))) == requests[1:]
    others: list[dict[str, Any]] = [
        {"requests_per_second": 1.0}, {"concurrency": 1, "is_benchmark": True}, {"concurrency": 1, "has_run": True}
    ]  # fmt: skip
    assert all(list(counted(requests, Load(**asked))) == requests for asked in others)


def test_a_rate_is_simulated_until_its_times_no_longer_move() -> None:
    """A busy server's queue moves for long: 1,000 requests say little, and their number doubles."""
    asked: dict[str, Any] = {"requests_per_second": 4.7, **VARYING}
    short, settled, long = (kvcalc.simulate(MODEL, "l40s", requests=number, **asked) for number in (1000, None, 30_000))
    assert settled["results"]["requests"] > 1000
    errors = [abs(times(document, "ttft")["mean"] / times(long, "ttft")["mean"] - 1) for document in (short, settled)]
    assert errors[1] < 0.1
    assert errors[1] < errors[0]


def test_a_run_that_never_settles_says_so_and_one_that_does_not_keep_up_ends() -> None:
    found = kvcalc.simulate(MODEL, "l40s", requests_per_second=5.25, **VARYING)
    texts = [note["text"] for note in found["warnings"] if note["code"] == "unsettled"]
    if found["results"]["keeps_up"]:
        assert found["results"]["requests"] == 16_000
        assert texts[0].endswith("--requests 32000 simulates more")
    overloaded = kvcalc.simulate(MODEL, "l40s", requests_per_second=12.0, **VARYING)
    assert not overloaded["results"]["keeps_up"]
    assert overloaded["results"]["requests"] == 1000
    assert not overloaded["warnings"]


def answered(ttft: float, number: int) -> Request:
    request = Request(number, float(number), 10, 11)
    request.first_token, request.finish = number + ttft, number + ttft + 1
    return request


def test_times_that_grow_move() -> None:
    same = [answered(0.5, number) for number in range(100)]
    assert largest_move(same) == pytest.approx(0, abs=1e-9)
    growing = [answered(0.5 + 0.01 * number, number) for number in range(100)]
    assert largest_move(growing) > 10
    # The mean moves by 1 %: half of what is allowed.
    later = [answered(0.5 if number < 50 else 0.51, number) for number in range(100)]
    assert largest_move(later) == pytest.approx(0.5, rel=0.02)
    single = [Request(number, 0.0, 10, 1) for number in range(10)]
    for request in single:
        request.first_token = request.finish = 1.0
    assert largest_move(single) == 0


def test_both_pools_leave_out_the_first_requests_too() -> None:
    asked: dict[str, Any] = {
        "prefill_replicas": 2, "transfer": "infiniband-400g", "concurrency": 16, "requests": 400, **VARYING
    }  # fmt: skip
    steady, benchmark = (kvcalc.simulate(MODEL, DEVICE, **asked, benchmark=counts) for counts in (False, True))
    assert (steady["results"]["counted_requests"], benchmark["results"]["counted_requests"]) == (384, 400)
    assert times(steady, "ttft")["max"] < times(benchmark, "ttft")["max"]


def test_the_screen_says_what_does_not_count(kvcalc: Any) -> None:
    base = (
        "simulate llama-3.1-8b --gpu h100 --concurrency 4 --input-tokens 100 --output-tokens 20 --requests 100"
    ).split()
    assert "times leave out the first request of each client (--benchmark counts it)" in kvcalc(*base).out
    out = kvcalc(*base, "--benchmark").out
    assert "as a benchmark" in out
    assert "mean TTFT without the first request of each client" in out
