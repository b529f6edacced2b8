"""The first step of a load: on a server that has just started, and of clients that start together."""

from __future__ import annotations

from typing import Any, cast

import pytest

import kvcalc
from kvcalc.question.question import Question
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.simulation import scheduler as scheduler_module
from kvcalc.simulation.loads.load import Load
from kvcalc.simulation.loads.requests import Request
from kvcalc.simulation.scheduler import scheduler_of
from kvcalc.throughput.constants import load_constants
from kvcalc.throughput.hardware import find_devices, find_gpu
from kvcalc.throughput.roofline import SpeedModel
from tests.conftest import loaded

ASKED = Question(loaded("llama-3.1-8b"), 4096, engine="sglang", devices=find_devices("h100"))
LENGTHS: dict[str, Any] = {"prompt_tokens": "uniform:800..1200", "answer_tokens": "uniform:100..300"}


def simulated(**asked: Any) -> Any:
    return kvcalc.simulate(asked.pop("model", "llama-3.1-8b"), asked.pop("gpu", "h100"), **LENGTHS, **asked)


def longest_ttft(document: Any) -> float:
    (row,) = [row for row in document["times"] if row["metric"] == "ttft"]
    return float(row["max_seconds"])


@pytest.mark.parametrize(
    ("asked", "cold"),
    [
        ({"concurrency": 8}, False),
        ({"concurrency": 8, "num_requests": 80}, False),
        ({"concurrency": 8, "num_requests": 80, "is_benchmark": True}, True),
        ({"concurrency": 8, "num_requests": 81, "is_benchmark": True}, False),
        ({"concurrency": 8, "num_requests": 80, "is_benchmark": True, "cold": False}, False),
        ({"concurrency": 8, "cold": True}, True),
        ({"requests_per_second": 2.0, "num_requests": 10}, False),
        ({"requests_per_second": 2.0, "cold": True}, True),
        ({"concurrency": 1, "num_requests": 1, "has_run": True}, False),
    ],
)
def test_a_short_benchmark_of_clients_finds_a_server_that_has_just_started(asked: dict[str, Any], cold: bool) -> None:
    assert Load(**asked).is_cold is cold


@pytest.mark.parametrize(
    ("model", "gpu", "more"),
    [
        ("llama-3.1-8b", "h100", {}),
        ("llama-3.1-8b", "h100", {"engine": "sglang"}),
        ("deepseek-v3", "h200x8", {"data_parallel_size": 8}),
        ("llama-3.1-8b", "h100", {"prefill_replicas": 1, "transfer": "nvlink"}),
    ],
)
def test_the_first_requests_wait_for_a_cold_server_and_no_other(model: str, gpu: str, more: dict[str, Any]) -> None:
    """At two requests a second, the first one is answered before many others come."""
    constants, _ = load_constants(more.get("engine", "vllm"), find_gpu(gpu.partition("x")[0]))
    warm, cold = (
        simulated(model=model, gpu=gpu, requests_per_second=0.2, requests=20, cold=is_cold, **more)
        for is_cold in (False, True)
    )
    assert longest_ttft(cold) - longest_ttft(warm) > 0.9 * constants.cold_seconds
    medians = [next(row["p50_seconds"] for row in found["times"] if row["metric"] == "ttft") for found in (warm, cold)]
    assert medians[0] == pytest.approx(medians[1], rel=0.05)
    assert (warm["load"]["is_cold"], cold["load"]["is_cold"]) == (False, True)


def test_clients_that_start_together_wait_for_their_first_step_and_requests_at_random_do_not() -> None:
    constants, _ = load_constants("vllm", find_gpu("h100"))
    alone = simulated(requests_per_second=0.2, requests=20)
    together = simulated(concurrency=1, requests=20, benchmark=True)
    assert longest_ttft(together) - longest_ttft(alone) == pytest.approx(constants.first_seconds, rel=0.3)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_cold_server_has_the_first_step_that_is_fitted_to_the_99th_percentile(engine: str) -> None:
    """The constant of a warm server is fitted to means, and is no part of it: it may be the longer one."""
    constants, _ = load_constants(engine, find_gpu("h200"))
    for load in (Load(concurrency=4, num_requests=40, is_benchmark=True), Load(requests_per_second=1.0, cold=True)):
        assert load.first_seconds(constants) == constants.cold_seconds
    assert Load(concurrency=4, num_requests=41, is_benchmark=True).first_seconds(constants) == constants.first_seconds
    assert Load(concurrency=4, cold=False).first_seconds(constants) == 0
    longer = constants._replace(first_seconds=2 * constants.cold_seconds)
    assert Load(concurrency=4, cold=True).first_seconds(longer) == constants.cold_seconds


def first_wait(
    load: Load, engine: str, requests: list[Request], host: tuple[float, float], servers: int = 1, slots: int = 8
) -> Any:
    """The wait of the first requests without the first step's own. `host` has its time of a request and of a token."""
    case = make_case(Question(loaded("llama-3.1-8b"), 4096, engine=engine, devices=find_devices("h100")))
    model = cast("Speed", speed_of(case, [])).model
    scheduler, c = scheduler_of(case, model, 4096), model.constants
    c = c._replace(first_seconds=0.3, ttft_seconds=host[0], ttft_token_seconds=host[1])
    scheduler = scheduler._replace(rules=scheduler.rules._replace(max_running=slots))
    found = scheduler.first_wait(load, SpeedModel(model.counts, model.gpu, c), requests, servers)
    return found - load.first_seconds(c)


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(concurrency=3, cold=False)])
def test_first_requests_of_clients_wait_for_the_host_s_time_of_each_other(load: Load) -> None:
    host = (0.01, 1e-5)
    requests = [Request(number, 0.0, tokens, 8) for number, tokens in enumerate((100, 200, 300))]
    assert first_wait(load, "vllm", requests, host) == pytest.approx(2 * 0.012)
    for few, servers, slots in ((requests[:1], 1, 8), (requests, 3, 8), (requests, 1, 1)):
        assert first_wait(load, "vllm", few, host, servers, slots) == 0


def test_sglang_reads_them_while_it_computes_their_prompts_so_the_longer_of_both_counts() -> None:
    load, model = Load(concurrency=3), cast("Speed", speed_of(make_case(ASKED), [])).model
    requests = [Request(number, 0.0, 2000, 8) for number in range(3)]
    each = model.prefill(2000, 4).seconds / 4  # a step has 8,192 tokens
    assert first_wait(load, "sglang", requests, (each / 2, 0.0)) == 0
    slow = first_wait(load, "sglang", requests, (3 * each, 0.0))
    assert slow == pytest.approx(2 * 2 * each, rel=0.02)
    # What is found in the prefix cache is not computed.
    cached = [Request(number, 0.0, 2000, 8, 1900) for number in range(3)]
    assert first_wait(load, "sglang", cached, (each, 0.0)) > 1.5 * each


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_so_the_first_tokens_of_a_warm_server_are_later_with_a_slow_host(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_tokens() -> dict[str, float]:
        found = simulated(engine=engine, concurrency=16, requests=48, cold=False, benchmark=True)
        (row,) = [row for row in found["times"] if row["metric"] == "ttft"]
        return {"p50": row["p50_seconds"], "p99": row["p99_seconds"]}

    before = first_tokens()
    monkeypatch.setattr(scheduler_module, "first_host_wait", lambda c, tokens, others, hidden: 2.0 * others)
    after = first_tokens()
    assert after["p99"] > before["p99"] + 29
    assert after["p50"] < before["p50"] + 1  # two of three requests come later


def test_the_command_line_has_both_and_refuses_them_together(run: Any) -> None:
    base = (
        "simulate llama-3.1-8b --gpu h100 --concurrency 2 --input-tokens 100 --output-tokens 10 --get load.is_cold"
    ).split()
    assert run(*base, "--cold").out.strip() == "true"
    assert run(*base, "--warm", "--requests", "20").out.strip() == "false"
    assert run(*base, "--requests", "20").out.strip() == "false"
    assert run(*base, "--requests", "20", "--benchmark").out.strip() == "true"
    refused = run(*base, "--warm", "--cold")
    assert (refused.status, refused.err.splitlines()) == (
        2, ["kvcalc: --cold and --warm cannot be combined", "  use one"]
    )  # fmt: skip


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    """`kvcalc` of the command line, which has the same name as the module here."""
    return request.getfixturevalue("kvcalc")
