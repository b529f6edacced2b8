"""Options that change how kernels are launched: no CUDA graphs, and LoRA adapters."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.throughput.constants import load_constants
from tests.documents import estimate


def step(name: str, devices: str, batch: int = 1, dtype: str | None = None, **settings: Any) -> float:
    """The seconds of a decode step of vLLM 0.33."""
    named = {name.replace("_", "-"): value for name, value in settings.items()}
    answer = estimate(
        kvcalc.load_model(name), devices=kvcalc.find_devices(devices), engine="vllm@0.33", batch_size=batch,
        context_tokens=512, engine_settings=named, dtype=dtype,
    )  # fmt: skip
    return float(answer["throughput"]["decode_step_seconds"])


# The steps of one request from which vLLM's constant was taken (kvcalc/engines/vllm/engine.yaml).
@pytest.mark.parametrize(
    ("name", "dtype", "devices", "measured", "most"),
    [
        ("gpt2", None, "h200", 4.8e-3, 0.05),
        ("qwen3.6-27b", "int4", "rtx-5090", 41.7e-3, 0.2),
        ("qwen2.5-7b", None, "a100", 22.5e-3, 0.5),
    ],
)
def test_a_step_without_graphs_takes_as_long_as_launching_its_kernels(
    name: str, dtype: str | None, devices: str, measured: float, most: float
) -> None:
    eager = step(name, devices, dtype=dtype, enforce_eager=True)
    assert eager == pytest.approx(measured, rel=most)
    assert eager > step(name, devices, dtype=dtype)


def test_compiled_steps_without_graphs_are_launched_faster_than_eager_ones() -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"cudagraph_mode": "none"},
        {"cudagraph_mode": "none", "enforce_eager": True},
        {"enforce_eager": True},
    ]
    graphs, compiled, both, eager = (step("qwen3-0.6b", "h100", **mode) for mode in modes)
    assert graphs < compiled < eager == both


def test_a_step_that_computes_for_longer_does_not_wait_for_launches() -> None:
    assert step("llama-3.1-8b", "h100", 512, enforce_eager=True) == step("llama-3.1-8b", "h100", 512)


def test_short_prompts_wait_for_launches_too() -> None:
    speed = kvcalc.SpeedQuestion(input_tokens=16, output_tokens=64, concurrency=1)
    times = [
        estimate(
            kvcalc.load_model("llama-3.1-8b"), devices=kvcalc.find_devices("h100"), engine="vllm", speed=speed,
            engine_settings=settings,
        )["throughput"]["serving"]
        for settings in ({}, {"enforce-eager": True})
    ]  # fmt: skip
    graphs, eager = times
    assert eager["ttft_seconds"] > graphs["ttft_seconds"]
    assert eager["tpot_seconds"] > 1.5 * graphs["tpot_seconds"]


def test_adapters_cost_launches_and_more_of_them_cost_more() -> None:
    plain = step("llama-3.1-8b", "h100")
    one = step("llama-3.1-8b", "h100", max_loras="1", max_lora_rank="16")
    # vllm-project/vllm#25914: 10 % with kernels that do nothing, because no request uses an adapter.
    assert plain * 1.1 < one < plain * 1.5
    assert step("llama-3.1-8b", "h100", 64, max_loras="8", max_lora_rank="16") > step(
        "llama-3.1-8b", "h100", 64, max_loras="1", max_lora_rank="16"
    )
    assert step("llama-3.1-8b", "h100", max_loras="1", max_lora_rank="256") > one


def test_adapters_without_graphs_double_the_launches() -> None:
    """Rollouts of Qwen3-4B took 214 s without graphs, and 481 s with an adapter besides (NovaSky-AI/SkyRL#607)."""
    eager = step("qwen3-4b", "h100", 128, enforce_eager=True)
    both = step("qwen3-4b", "h100", 128, enforce_eager=True, max_loras="1", max_lora_rank="512")
    assert both / eager == pytest.approx(481 / 214, rel=0.2)


@pytest.mark.parametrize(
    ("devices", "dtype", "release", "launches"),
    [
        ("b200x8", "nvfp4", "0.14.1", 0), ("b200x8", "nvfp4", "0.15.0", 3), ("b200x8", "nvfp4", "0.33", 3),
        ("b200x8", "fp8", "0.33", 0), ("rtx-pro-6000x8", "nvfp4", "0.33", 0),
    ],
)  # fmt: skip
def test_experts_in_nvfp4_take_fewer_launches_where_their_kernels_quantise(
    devices: str, dtype: str, release: str, launches: int
) -> None:
    """Of 94 layers with experts (Qwen3-235B-A22B). vLLM's kernels are chosen by release and device."""
    spec = kvcalc.load_model("qwen3-235b-a22b")
    overheads = []
    for engine in (f"vllm@{release}", "vllm@0.14.0"):
        answer = estimate(
            spec, devices=kvcalc.find_devices(devices), engine=engine, batch_size=4, context_tokens=512, dtype=dtype,
            tensor_parallel_size=8,
        )  # fmt: skip
        overheads.append(answer["throughput"]["parts"]["overhead_seconds"])
    kernel = load_constants("vllm", kvcalc.find_devices(devices).gpu)[0].kernel_seconds
    assert overheads[1] - overheads[0] == pytest.approx(94 * launches * kernel, abs=1e-9)
