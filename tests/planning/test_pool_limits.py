"""Options that limit the cache itself: the same requests run by the short form, the simulation and the budget."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import LayoutError

# One token of llama-3.1-8b takes 128 KiB, and a block of vLLM has 16 tokens.
TOKEN = 131_072
LIMITS: dict[str, tuple[dict[str, object], int]] = {
    "vllm": ({"num-gpu-blocks-override": 3200}, 3200 * 16 * TOKEN),
    "sglang": ({"max-total-tokens": 51_200}, (51_200 + 1) * TOKEN),  # with the dummy page
    "tensorrt-llm": ({"max-tokens": 51_200}, 51_200 * TOKEN),
}


def estimated(engine: str, settings: dict[str, object], **asked: Any) -> kvcalc.documents.Estimate:
    return kvcalc.estimate(
        "llama-3.1-8b", devices=kvcalc.find_devices("h100"), engine=engine, engine_settings=settings, **asked
    )


@pytest.mark.parametrize("engine", LIMITS)
def test_a_limit_of_the_cache_is_the_memory_for_it(engine: str) -> None:
    settings, size = LIMITS[engine]
    fit, without = (estimated(engine, given)["fit"] for given in (settings, {}))
    assert fit is not None
    assert without is not None
    assert fit["lines"] is not None
    assert fit["kv_cache_memory_bytes"] == size
    (unused,) = [line["bytes"] for line in fit["lines"] if line["name"].endswith(f"(--{next(iter(settings))})")]
    assert unused == (without["kv_cache_memory_bytes"] or 0) - size
    assert sum(line["bytes"] for line in fit["lines"]) == fit["device_bytes"]
    # What is left over grows and shrinks with the estimated parts, and the cache does not.
    assert fit["free_low_bytes"] is None
    assert fit["free_high_bytes"] is None
    # No smaller limit than the memory changes anything.
    if engine != "vllm":
        assert estimated(engine, dict.fromkeys(settings, 10**9))["fit"] == without


@pytest.mark.parametrize("engine", LIMITS)
def test_as_many_requests_run_by_the_short_form_as_in_the_simulation(engine: str) -> None:
    settings, _ = LIMITS[engine]
    speed = kvcalc.SpeedQuestion(input_tokens=1000, output_tokens=1000, concurrency=100)
    throughput = estimated(engine, settings, speed=speed)["throughput"]
    assert throughput is not None
    closed = throughput["serving"]
    assert closed is not None
    found = kvcalc.simulate(
        "llama-3.1-8b", "h100", engine=engine, engine_settings=settings, prompt_tokens="uniform:700..1300",
        answer_tokens="uniform:700..1300", concurrency=100, requests=2000,
    )  # fmt: skip
    assert found["engine"]["blocks"] == {"vllm": 3199, "sglang": 51_200, "tensorrt-llm": 1600}[engine]
    assert closed["running_requests"] < 40
    assert found["results"]["mean_running_requests"] == pytest.approx(closed["running_requests"], rel=0.15)
    assert found["results"]["requests_per_second"] == pytest.approx(closed["requests_per_second"], rel=0.1)


def test_vllm_does_not_start_with_more_blocks_than_fit() -> None:
    with pytest.raises(LayoutError, match="--num-gpu-blocks-override: its cache takes 390"):
        estimated("vllm", {"num-gpu-blocks-override": 200_000})


@pytest.mark.parametrize(
    ("model", "gpu"), [("gemma-3-12b", "h100"), ("qwen3-next-80b-a3b", "h100x8"), ("deepseek-v4-flash", "h200x4")]
)
def test_sglang_limits_every_kind_of_pool(model: str, gpu: str) -> None:
    asked: dict[str, Any] = {"engine": "sglang", "devices": kvcalc.find_devices(gpu), "context_tokens": 8192}
    asked["tensor_parallel_size"] = asked["devices"].num_devices
    page = 256 if "v4" in model else 1
    for most in (20_000, 40_000):
        engine: Any = kvcalc.estimate(model, engine_settings={"max-total-tokens": most}, **asked)["engine"]
        assert engine["kv_cache_tokens"] == most // page * page


def test_the_step_of_tensorrt_llm_decides_its_activations() -> None:
    few, many = (estimated("tensorrt-llm", {"max-num-tokens": tokens})["fit"] for tokens in (2048, 8192))
    assert few is not None
    assert many is not None
    assert many["activation_bytes"] == 4 * (few["activation_bytes"] or 0)
