"""The simulation and the closed form of serving agree where both apply: a closed loop of about equal requests."""

from __future__ import annotations

import pytest

import kvcalc

MODEL, DEVICE = "llama-3.1-8b", "h100"
LOADS = [(1000, 1000, 1), (1000, 1000, 8), (1000, 1000, 64), (8000, 500, 16), (2000, 500, 32)]


def simulated(engine: str, prompt: int, answer: int, concurrency: int) -> kvcalc.documents.Simulate:
    return kvcalc.simulate(
        MODEL, DEVICE, engine=engine, prompt_tokens=f"uniform:{int(prompt * 0.9)}..{int(prompt * 1.1)}",
        answer_tokens=f"uniform:{int(answer * 0.9)}..{int(answer * 1.1)}", concurrency=concurrency,
        requests=max(300, 10 * concurrency),
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_means_are_those_of_the_closed_form(engine: str, load: tuple[int, int, int]) -> None:
    prompt, answer, concurrency = load
    found = simulated(engine, *load)
    asked = kvcalc.SpeedQuestion(input_tokens=prompt, output_tokens=answer, concurrency=concurrency)
    devices = kvcalc.find_devices(DEVICE)
    throughput = kvcalc.estimate(MODEL, devices=devices, engine=engine, speed=asked)["throughput"]
    assert throughput is not None
    serving = throughput["serving"]
    assert serving is not None
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(serving["tpot_seconds"], rel=0.05)
    assert found["results"]["tokens_per_second"] == pytest.approx(serving["tokens_per_second"], rel=0.1)
    # The closed form has the mean of many servers for the requests that arrive together.
    assert times["ttft"] == pytest.approx(serving["ttft_seconds"], rel=0.35)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_full_cache_is_never_overfull_and_loses_no_request(engine: str) -> None:
    found = simulated(engine, 1000, 1000, 512)
    engine_part, results = found["engine"], found["results"]
    assert engine_part["blocks"] is not None
    assert results["most_used_blocks"] is not None
    assert 0.95 * engine_part["blocks"] < results["most_used_blocks"] <= engine_part["blocks"]
    assert results["requests"] == 5120
    assert (results["preemptions"] > 0) == (engine != "tensorrt-llm")
