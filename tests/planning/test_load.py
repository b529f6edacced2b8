"""Requests to serve: the answer describes the load, and it fits even if some requests have to wait."""

from __future__ import annotations

from typing import Any

import pytest

GIVEN = ("llama-3.1-8b", "--gpu", "l4", "--engine", "vllm")


def requests(tokens: int, concurrency: int | None) -> tuple[str, ...]:
    more = () if concurrency is None else ("--concurrency", str(concurrency))
    return ("--input-tokens", str(tokens - 1000), "--output-tokens", "1000", *more)


def test_a_load_of_which_not_one_request_runs_does_not_fit(kvcalc: Any) -> None:
    result = kvcalc("estimate", *GIVEN, *requests(101_000, 4), "--check", "--json")
    assert result.status == 4
    answer = result.json
    assert answer["workload"] == {
        "context_tokens": 101_000, "batch_size": 1, "encoder_tokens": None, "input_tokens": 100_000,
        "output_tokens": 1000, "concurrency": 4, "prefix_hit_rate": None,
    }  # fmt: skip
    assert (answer["fit"]["fits"], answer["fit"]["verdict"], answer["fit"]["max_batch_size"]) == (
        False,
        "does_not_fit",
        0,
    )
    assert answer["throughput"] is None
    assert not any(said["part"] == "throughput" for said in answer["warnings"])


@pytest.mark.parametrize("concurrency", [1, 2, 1000, None])
def test_the_batch_is_the_requests_that_run(kvcalc: Any, concurrency: int | None) -> None:
    answer = kvcalc("estimate", *GIVEN, *requests(9000, concurrency), "--check", "--json").json
    fit, workload = answer["fit"], answer["workload"]
    assert workload["context_tokens"] == 9000
    assert workload["batch_size"] == min(concurrency or 10**9, fit["max_batch_size"])
    assert fit["fits"]
    assert fit["kv_cache_bytes"] <= fit["kv_cache_memory_bytes"]
    assert answer["throughput"]["serving"]["running_requests"] == workload["batch_size"]


def test_requests_that_wait_are_named_in_the_verdict(kvcalc: Any) -> None:
    for command in ("estimate", "fit"):
        shown = kvcalc(command, *GIVEN, *requests(9000, 1000), "--format", "human")
        assert shown.status == 0
        assert "requests run, " in shown.out
        assert " wait\n" in shown.out
        assert "wait" not in kvcalc(command, *GIVEN, *requests(9000, 2), "--format", "human").out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", "8k"), "--context 8192"),
        (("--batch", "4"), "--batch 4"),
        (("--max-model-len", "8k"), "--context 8000"),
    ],
)
def test_a_workload_that_contradicts_the_requests_is_a_usage_error(
    kvcalc: Any, options: tuple[str, ...], said: str
) -> None:
    result = kvcalc("estimate", *GIVEN, *requests(9000, 2), *options)
    assert result.status == 2
    assert said in result.err
    assert kvcalc("estimate", *GIVEN, *requests(9000, 2), "--context", "9000", "--json").status == 0


def test_speed_is_null_if_not_one_sequence_fits(kvcalc: Any) -> None:
    answer = kvcalc("estimate", "llama-3-70b", "--gpu", "l4", "--json").json
    assert answer["throughput"] is None
    fit = kvcalc("fit", "llama-3-70b", "--gpu", "l4", "--json").json
    assert not any(said["part"] == "throughput" for said in fit["warnings"])
    # One sequence fits, but not all of them. The speed is for the requested batch.
    crowded = kvcalc("estimate", *GIVEN, "--context", "9000", "--batch", "999", "--json").json
    assert not crowded["fit"]["fits"]
    assert crowded["throughput"]["decode_step_seconds"] > 0
