"""`kvcalc plan --requests 10M --deadline 8h`: a job whose requests may wait."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.units import format_hours, parse_requests, parse_seconds
from tests.test_schema import check

MODEL, HOUR = "llama-3.1-8b", 3600.0
JOB: dict[str, Any] = {"input_tokens": 1000, "output_tokens": 200, "confidence": 50}


def planned(requests: int, seconds: float, **more: Any) -> Any:
    document: Any = kvcalc.plan(MODEL, ["h100"], requests=requests, deadline_seconds=seconds, **{**JOB, **more})
    check(document, "plan")
    return document


@pytest.mark.settled
def test_a_job_has_the_fewest_replicas_that_end_in_time() -> None:
    document = planned(400_000, HOUR)
    best, targets = document["best"], document["targets"]
    assert (targets["num_requests"], targets["deadline_seconds"]) == (400_000, HOUR)
    assert targets["requests_per_second"] == pytest.approx(400_000 / HOUR)
    assert best["replicas"] > 1
    assert (best["ttft_seconds"], best["tpot_seconds"] > 0) == (None, True)
    # A replica that always has more requests than it can run.
    alone: Any = kvcalc.simulate(
        MODEL, "h100", prompt_tokens=1000, answer_tokens=200, concurrency=2000,
        tensor_parallel_size=best["tensor_parallel_size"],
    )  # fmt: skip
    each = alone["results"]["requests_per_second"]
    assert best["replicas"] * each * HOUR > 0.98 * 400_000
    assert (best["replicas"] - 1) * each * HOUR < 1.02 * 400_000


def test_a_job_needs_less_than_requests_that_may_not_wait() -> None:
    job = planned(20_000, HOUR / 6)["best"]
    rate: Any = kvcalc.plan(MODEL, ["h100"], requests_per_second=20_000 / (HOUR / 6), **JOB)["best"]
    clients: Any = kvcalc.plan(MODEL, ["h100"], concurrency=2_000, **JOB)["best"]
    assert job["num_devices"] <= rate["num_devices"] < clients["num_devices"]


def test_more_time_needs_no_more_devices_and_no_time_has_a_reason() -> None:
    devices = [planned(300_000, hours * HOUR)["best"]["num_devices"] for hours in (0.25, 0.5, 1, 2)]
    assert devices == sorted(devices, reverse=True)
    (late,) = planned(100, 0.2)["plans"]
    assert "100 requests take" in late["reason"]
    assert late["reason"].endswith("and the deadline is 0.2 s")
    (small,) = planned(10_000_000, HOUR, max_devices=2)["plans"]
    assert not small["fits"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"requests": None}, "needs the number of requests"),
        ({"max_tpot_seconds": 0.02}, "--max-tpot: the requests of a job with a --deadline may wait"),
        ({"concurrency": 5}, "the rate follows from --requests"),
        ({"users": 5, "think_seconds": 1.0}, "the rate follows from --requests"),
    ],
)
def test_what_a_job_does_not_take(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kvcalc.plan(MODEL, ["h100"], **{"requests": 100, "deadline_seconds": 60.0, **JOB, **more})


def test_a_job_on_the_command_line(kvcalc: Any) -> None:
    words = ("plan", MODEL, "--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "200", "--deadline", "8h")
    shown = kvcalc(*words, "--requests", "10M", "--format", "human").out
    assert "10,000,000 requests within 8 h = 347 requests per second" in " ".join(shown.split())
    for more, said in (
        ((), "--deadline needs the number of requests"),
        (("--requests", "100", "--concurrency", "4"), "leave out the other load"),
        (("--requests", "1.5"), "not a whole number"),
    ):
        result = kvcalc(*words, *more)
        assert (result.status, said in " ".join(result.err.split())) == (2, True), result.err


def test_the_hosts_of_many_replicas_are_one_word_on_the_screen(kvcalc: Any) -> None:
    words = ("plan", MODEL, "--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "200")
    rate = ("--requests-per-second", "700", "--max-tpot", "20ms")
    shown = kvcalc(*words, *rate, "--format", "human").out
    document = kvcalc(*words, *rate, "--json").json
    replicas = document["best"]["replicas"]
    assert replicas > 9
    assert f"http://replica-{{0..{replicas - 1}}}:8000" in shown
    assert document["commands"][0]["router"].count("http://replica-") == replicas


def test_thousands_and_hours() -> None:
    assert [parse_requests(text, "--requests") for text in ("12", "1_000", "500k", "2.5M")] == [
        12, 1000, 500_000, 2_500_000
    ]  # fmt: skip
    assert [parse_seconds(text, "--deadline") for text in ("8h", "20min", "1.5 h")] == [28800, 1200, 5400]
    assert [format_hours(seconds) for seconds in (28800, 90, 59.9)] == ["8 h", "1.5 min", "59.9 s"]
    for text in ("k", "1.0005k", "-3", "10G"):
        with pytest.raises(UsageError):
            parse_requests(text, "--requests")


def test_the_cheapest_device_for_a_job_is_by_its_tokens() -> None:
    """Its rows have no time to first token, which the comparison with faster devices took for a number."""
    found = kvcalc.plan(
        MODEL, ["h100", "l40s"], prices={"h100-sxm": 2.0, "l40s": 1.0}, requests=20_000, deadline_seconds=2 * HOUR,
        **{**JOB, "output_tokens": 1},
    )  # fmt: skip
    assert found["ranked_by"] == "cost_per_million_output_tokens"
    assert found["gives_up"] is None
    costs = [row["cost_per_million_output_tokens"] or 0.0 for row in found["plans"]]
    assert found["best"] is not None
    assert found["best"]["cost_per_million_output_tokens"] == min(costs)
