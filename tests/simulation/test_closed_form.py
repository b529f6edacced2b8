"""The simulation and the closed form of serving agree where both apply: a closed loop of about equal requests."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation

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
    found, (ttft, tpot, rate) = simulated(engine, *load), estimated(MODEL, DEVICE, engine, *load)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(tpot, rel=0.05)
    assert found["results"]["tokens_per_second"] == pytest.approx(rate, rel=0.1)
    # A request that is alone waits for nothing. Otherwise, the simulation has all the requests that arrive at the
    # start, and the closed form the mean of many servers for them.
    assert times["ttft"] == pytest.approx(ttft, rel=0.01 if load[2] == 1 else 0.35)


OTHERS: dict[str, dict[str, Any]] = {
    "attention replicas": {"model": "deepseek-v3", "gpu": "h200x8", "data_parallel_size": 8},
    "drafts": {"model": MODEL, "gpu": DEVICE, "speculative": Speculation("ngram", 3, 2.0)},
    "drafts of attention replicas": {
        "model": "deepseek-v3", "gpu": "h200x8", "data_parallel_size": 8, "speculative": Speculation("mtp", 1, 1.8),
    },
    "a part on the host": {
        "model": "qwen3-30b-a3b", "gpu": "rtx-4090", "engine": "llama.cpp", "engine_settings": {"n-cpu-moe": "40"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_other_layouts_and_of_drafts(name: str) -> None:
    asked = {"engine": "vllm", **OTHERS[name]}
    model, gpu = asked.pop("model"), asked.pop("gpu")
    number = 8 if "host" in name else 32
    lengths: dict[str, Any] = {"prompt_tokens": "uniform:900..1100", "answer_tokens": "uniform:450..550"}
    found = kvcalc.simulate(model, gpu, **lengths, concurrency=number, requests=10 * number, **asked)
    _, tpot, rate = estimated(model, gpu, asked.pop("engine"), 1000, 500, number, **asked)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert times["tpot"] == pytest.approx(tpot, rel=0.05)
    assert found["results"]["tokens_per_second"] == pytest.approx(rate, rel=0.1)
    # The server gives the tokens of a step at once, and then nothing until the next one.
    if times["tpot"] is not None:
        assert times["itl"] == pytest.approx(times["tpot"] * found["engine"]["tokens_per_step"], rel=0.01)


def test_what_preempted_requests_compute_again_is_counted_and_the_answer_names_the_simulation() -> None:
    found, (ttft, tpot, rate) = simulated("vllm", 1000, 1000, 512), estimated(MODEL, DEVICE, "vllm", 1000, 1000, 512)
    times = {row["metric"]: row["mean_seconds"] for row in found["times"]}
    assert found["results"]["tokens_per_second"] == pytest.approx(rate, rel=0.02)
    assert times["tpot"] is not None
    assert times["ttft"] is not None
    # A preempted request waits between two of its tokens, which only the simulation follows.
    assert tpot < times["tpot"] == pytest.approx(tpot, rel=0.2)
    # The first 300 of 5,120 requests find an empty server.
    assert ttft > times["ttft"] == pytest.approx(ttft, rel=0.25)
    for engine, load, is_named in (("vllm", 512, True), ("vllm", 64, False), ("tensorrt-llm", 512, False)):
        question = kvcalc.SpeedQuestion(input_tokens=1000, output_tokens=1000, concurrency=load)
        answer = kvcalc.estimate(MODEL, devices=kvcalc.find_devices(DEVICE), engine=engine, speed=question)
        texts = [note["text"] for note in answer["warnings"] if note["code"] == "preemptions"]
        assert len(texts) == is_named
        assert not texts or "kvcalc simulate" in texts[0]


def estimated(
    model: str, device: str, engine: str, prompt: int, answer: int, concurrency: int, **more: Any
) -> tuple[float, float, float]:
    """The TTFT, the TPOT and the tokens per second of the closed form."""
    asked = kvcalc.SpeedQuestion(input_tokens=prompt, output_tokens=answer, concurrency=concurrency)
    devices = kvcalc.find_devices(device)
    throughput = kvcalc.estimate(model, devices=devices, engine=engine, speed=asked, **more)["throughput"]
    assert throughput is not None
    serving = throughput["serving"]
    assert serving is not None
    return serving["ttft_seconds"], serving["tpot_seconds"], serving["tokens_per_second"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_full_cache_is_never_overfull_and_loses_no_request(engine: str) -> None:
    found = simulated(engine, 1000, 1000, 512)
    engine_part, results = found["engine"], found["results"]
    assert engine_part["blocks"] is not None
    assert results["most_used_blocks"] is not None
    assert 0.95 * engine_part["blocks"] < results["most_used_blocks"] <= engine_part["blocks"]
    assert results["requests"] == 5120
    assert (results["preemptions"] > 0) == (engine != "tensorrt-llm")
