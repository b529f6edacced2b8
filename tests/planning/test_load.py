"""Requests to serve: the answer describes the load, and it fits even if some requests have to wait."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.question.question import SpeedQuestion
from tests.documents import estimate

pytestmark = pytest.mark.settled

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
        "output_tokens": 1000, "concurrency": 4, "prefix_hit_rate": None, "images": None,
    }  # fmt: skip
    assert (answer["fit"]["fits"], answer["fit"]["verdict"], answer["fit"]["max_batch_size"]) == (
        False,
        "does_not_fit",
        0,
    )
    assert answer["throughput"] is None
    assert not any(said["part"] == "throughput" for said in answer["warnings"])


@pytest.mark.parametrize("concurrency", [1, 2, 1000, None])
def test_the_batch_is_the_requests_that_fit_at_their_full_length(kvcalc: Any, concurrency: int | None) -> None:
    answer = kvcalc("estimate", *GIVEN, *requests(9000, concurrency), "--check", "--json").json
    fit, workload = answer["fit"], answer["workload"]
    assert workload["context_tokens"] == 9000
    assert workload["batch_size"] == min(concurrency or 10**9, fit["max_batch_size"])
    assert fit["fits"]
    assert fit["kv_cache_bytes"] <= fit["kv_cache_memory_bytes"]
    assert answer["throughput"]["serving"]["running_requests"] >= workload["batch_size"]


def served(engine: str, concurrency: int | None, *more: str, lengths: tuple[int, int] = (1024, 8192)) -> Any:
    """The batch, the requests that run, and the most that fit, of llama-3.1-8b on one H100."""
    answer = estimate(
        kvcalc.load_model("llama-3.1-8b"), engine=engine, devices=kvcalc.find_devices("h100"),
        engine_settings=dict(option.split("=") for option in more),
        speed=SpeedQuestion(input_tokens=lengths[0], output_tokens=lengths[1], concurrency=concurrency),
    )  # fmt: skip
    serving = answer["throughput"]["serving"]
    return answer["workload"]["batch_size"], serving["running_requests"], answer["fit"]["max_batch_size"]


@pytest.mark.parametrize(
    ("engine", "reserves"),
    [("vllm", False), ("sglang", False), ("tensorrt-llm", True), ("llama.cpp", True), ("logical", True)],
)
def test_engines_that_do_not_reserve_the_answer_run_requests_of_mean_length(engine: str, reserves: bool) -> None:
    batch, running, most = served(engine, 200)
    # A slot of llama.cpp has room for the longest request, of 18,706 tokens.
    assert batch == (27 if engine == "llama.cpp" else most) < 200
    # A request of mean length has 9,216 tokens at its end, and 5,575 on average: long answers, whose lengths vary by a
    # third, run for longer. SGLang keeps 9.8 % of the answers still to come free, and most of one request.
    longer = 8192 * (1 + 1 / 9)
    expected = batch * 9216 / (1024 + longer / 2)
    if engine == "sglang":
        expected = (batch * 9216 - 8302) / (1024 + longer / 2 * 1.098)
    if reserves:
        expected = batch * 9216 / (1024 + longer) if engine == "tensorrt-llm" else batch
    assert running == pytest.approx(expected, rel=0.07)


def test_the_mean_is_that_of_prompt_and_half_of_the_answer() -> None:
    batch, running, _ = served("vllm", 200, lengths=(8192, 64))
    # Prompts of 8,192 tokens on average leave the rest of the memory to nobody.
    assert 0.9 * batch <= running <= batch + 1


def test_no_more_run_than_are_asked_for() -> None:
    for engine in ("vllm", "sglang"):
        batch, running, most = served(engine, 60)
        assert batch == most < running == 60
        assert served(engine, 8)[:2] == (8, 8)


@pytest.mark.parametrize(
    ("engine", "option"), [("vllm", "max-num-seqs"), ("sglang", "max-running-requests"), ("llama.cpp", "parallel")]
)
@pytest.mark.parametrize("concurrency", [None, 200])
def test_the_engines_own_limit_counts(engine: str, option: str, concurrency: int | None) -> None:
    assert served(engine, concurrency, f"{option}=5")[:2] == (5, 5)


def test_the_devices_default_limit_counts() -> None:
    # vLLM runs at most 1,024 requests on an H100 (get_batch_defaults, arg_utils.py).
    batch, running, _ = served("vllm", 5000, lengths=(16, 16))
    # A place is taken again a step after its answer has ended.
    assert (batch, running <= 1024, running > 850) == (1024, True, True)


@pytest.mark.parametrize(("engine", "said"), [("vllm", " wait; 50 fit at full length\n"), ("tensorrt-llm", " wait\n")])
def test_requests_that_wait_are_named_in_the_verdict(kvcalc: Any, engine: str, said: str) -> None:
    given = ("llama-3.1-8b", "--gpu", "h100", "--engine", engine)
    shown = kvcalc("estimate", *given, *requests(9000, 1000), "--format", "human")
    assert shown.status == 0
    assert "requests run, " in shown.out
    assert said in shown.out
    assert "fit at full length\n" in kvcalc("fit", *given, *requests(9000, 1000), "--format", "human").out
    for command in ("estimate", "fit"):
        assert "of 2 requests" not in kvcalc(command, *given, *requests(9000, 2), "--format", "human").out


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
    # One sequence fits, but not all of them. The batch that was asked for does not run.
    crowded = kvcalc("estimate", *GIVEN, "--context", "9000", "--batch", "999", "--json").json
    assert not crowded["fit"]["fits"]
    assert crowded["throughput"] is None
