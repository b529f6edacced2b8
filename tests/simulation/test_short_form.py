"""The short form, which orders the candidates of a search, is near the simulation that decides."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.planning.answers.short_form import places_of
from kvcalc.question.question import Question
from kvcalc.server.case import make_case

pytestmark = pytest.mark.settled

MODEL, DEVICE = "llama-3.1-8b", "h100"
Load = tuple[int, int, int]


def both(model: str, device: str, engine: str, load: Load, **more: Any) -> tuple[Any, Any]:
    """The `serving` parts of an estimate: simulated, and by the short form."""
    speed = kvcalc.SpeedQuestion(input_tokens=load[0], output_tokens=load[1], concurrency=load[2])
    answers = (
        kvcalc.estimate(model, devices=kvcalc.find_devices(device), engine=engine, speed=asked, **more)["throughput"]
        for asked in (speed, speed._replace(short_form=True))
    )
    simulated, short = (answer and answer["serving"] for answer in answers)
    assert simulated
    assert short
    return simulated, short


def check(simulated: Any, short: Any, rate: float, ttft: float) -> None:
    assert short["requests_per_second"] == pytest.approx(simulated["requests_per_second"], rel=rate)
    assert simulated["ttft_seconds"] / ttft < short["ttft_seconds"] < ttft * simulated["ttft_seconds"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize(
    "load", [(1000, 1000, 1), (1000, 1000, 8), (1000, 1000, 64), (8000, 500, 16), (2000, 500, 32)], ids=str
)
def test_a_load_with_room_is_that_of_the_simulation(engine: str, load: Load) -> None:
    simulated, short = both(MODEL, DEVICE, engine, load)
    check(simulated, short, 0.06, 1.25)
    assert short["tpot_seconds"] == pytest.approx(simulated["tpot_seconds"], rel=0.06)


@pytest.mark.parametrize(
    ("engine", "model", "device", "tensor_parallel_size", "load"),
    [
        ("vllm", "llama-3.3-70b", "h100x4", 4, (2689, 117, 108)),
        ("tensorrt-llm", "qwen3-32b", "h100x2", 2, (15_370, 52, 14)),
        ("sglang", "llama-3.1-8b", "a100-80gb", 1, (3316, 110, 34)),
        ("sglang", "llama-3.1-8b", "h100", 1, (1500, 30, 100)),
        ("vllm", "llama-3.1-8b", "a100-80gb", 1, (10_947, 102, 2)),
    ],
)
def test_so_is_that_of_a_server_that_is_busy_with_prompts(
    engine: str, model: str, device: str, tensor_parallel_size: int, load: Load
) -> None:
    check(*both(model, device, engine, load, tensor_parallel_size=tensor_parallel_size), 0.15, 2.0)


OTHERS: dict[str, dict[str, Any]] = {
    "DP ranks of vLLM": {"model": "deepseek-v3", "device": "h200x8", "engine": "vllm", "data_parallel_size": 8},
    "DP ranks of SGLang": {"model": "deepseek-v3", "device": "h200x8", "engine": "sglang", "data_parallel_size": 8},
    "drafts": {"model": MODEL, "device": DEVICE, "engine": "vllm", "speculative": Speculation("ngram", 3, 2.0)},
    "a part on the host": {
        "model": "qwen3-30b-a3b", "device": "rtx-4090", "engine": "llama.cpp", "engine_settings": {"n-cpu-moe": "40"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_other_layouts_and_of_drafts(name: str) -> None:
    check(*both(load=(1000, 500, 4 if "host" in name else 32), **OTHERS[name]), 0.12, 1.5)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("load", [(1000, 1000, 120), (4000, 1000, 60)], ids=str)
def test_of_requests_that_wait_for_memory_as_many_run(engine: str, load: Load) -> None:
    simulated, short = both("qwen3-30b-a3b", DEVICE, engine, load)
    assert simulated["running_requests"] < load[2]
    assert short["running_requests"] == pytest.approx(simulated["running_requests"], rel=0.2)
    check(simulated, short, 0.15, 1.5)


def test_more_clients_than_places_share_the_rate_of_the_places() -> None:
    few, many = (both(MODEL, DEVICE, "vllm", (1000, 1000, clients))[1] for clients in (3000, 6000))
    assert few["requests_per_second"] == pytest.approx(many["requests_per_second"], rel=1e-3)
    # Little's law: the others wait.
    stay = [found["ttft_seconds"] + 1000 * found["tpot_seconds"] for found in (few, many)]
    assert stay[1] == pytest.approx(2 * stay[0], rel=1e-3)


def test_a_batch_without_a_load_holds_its_places() -> None:
    """The fit asks so for decode steps."""
    question = Question(kvcalc.load_model(MODEL), engine="vllm", devices=kvcalc.find_devices(DEVICE), batch_size=8)
    assert places_of(make_case(question), 1024) == 8
