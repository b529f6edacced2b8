"""Pipeline stages: the layers of each stage, and the bytes that every engine counts for them."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.engines import ENGINES, load_engine
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.memory.sharding import Bounds, stages_of, whole_of
from kvcalc.throughput.hardware import find_devices
from tests.conftest import asked_presets, loaded
from tests.documents import estimate

# mlx runs on one device only.
WITH_STAGES = [name for name in ENGINES if name != "mlx"]


def stage_bounds(name: str, num_layers: int, stages: int) -> Bounds:
    return load_engine(name, kvcalc.load_model("llama-3.1-8b")).stage_bounds(num_layers, stages)


def test_engines_cut_what_does_not_divide_in_their_own_ways() -> None:
    for name in ("vllm", "logical", "transformers"):
        assert stage_bounds(name, 32, 3) == ((0, 10), (11, 21), (22, 31))
        assert stage_bounds(name, 62, 4) == ((0, 14), (15, 30), (31, 46), (47, 61))
    assert stage_bounds("sglang", 32, 3) == ((0, 9), (10, 20), (21, 31))
    assert stage_bounds("tensorrt-llm", 32, 3) == ((0, 10), (11, 21), (22, 31))
    assert stage_bounds("tensorrt-llm", 62, 4) == ((0, 15), (16, 31), (32, 46), (47, 61))
    # llama.cpp counts the output as one more layer, on the last device.
    assert stage_bounds("llama.cpp", 32, 2) == ((0, 16), (17, 31))
    assert stage_bounds("llama.cpp", 2, 2) == ((0, 1), (2, 1))
    for name in ENGINES:
        assert stage_bounds(name, 8, 1) == ((0, 7),)


def test_a_stage_keeps_the_numbers_of_its_layers_and_knows_its_model() -> None:
    spec = kvcalc.load_model("gemma-3-27b")
    stages = stages_of(spec, stage_bounds("vllm", 62, 4))
    assert [(stage.layers[0].first, stage.layers[-1].last) for stage in stages] == [
        (0, 14),
        (15, 30),
        (31, 46),
        (47, 61),
    ]
    assert [stage.num_layers for stage in stages] == [15, 16, 16, 15]
    assert all(whole_of(stage) is spec for stage in stages)
    assert whole_of(spec) is spec


@pytest.mark.long
@pytest.mark.parametrize("engine", WITH_STAGES)
def test_the_stages_of_every_engine_hold_the_whole_together(engine: str, pytestconfig: pytest.Config) -> None:
    counted = 0
    for name in asked_presets(pytestconfig):
        spec = loaded(name)
        try:
            one = estimate(spec, context_tokens=2000, batch_size=3, engine=engine)["kv_cache"]
            three = estimate(spec, context_tokens=2000, batch_size=3, engine=engine, pipeline_parallel_size=3)
        except (ModelError, UsageError, LayoutError):
            continue
        cache = three["kv_cache"]
        # SGLang has a request table on every stage, which is counted for DeepSeek-V4's default number of requests.
        tables = [line["bytes"] for line in three["engine"].get("pool_lines") or [] if line["name"] == "request table"]
        more = cache["devices_total_bytes"] - cache["total_bytes"] - 2 * sum(tables)
        if engine == "transformers" and spec.model_type == "qwen4_exp_text":
            more -= 2 * 3 * 2000 * 24  # the indexers' positions, which every stage counts
        # TensorRT-LLM's pools have whole pages of memory, and proportions that depend on the layers of the stage.
        has_pools = engine == "tensorrt-llm" and len(spec.layers) > 1
        assert abs(more) <= (0.25 * cache["total_bytes"] if has_pools else 0), name
        # Each of vLLM's stages pads its groups, so together they may hold more than a single device.
        assert cache["total_bytes"] == one["total_bytes"] or engine == "vllm", name
        assert cache["devices_total_bytes"] / 3 <= cache["bytes_per_device"] <= one["total_bytes"], name
        assert three["engine"]["pipeline_parallel_size"] == 3
        counted += 1
    assert counted > 50


@pytest.mark.parametrize("engine", WITH_STAGES)
def test_a_device_of_two_holds_half_the_layers(engine: str) -> None:
    spec, largest = kvcalc.load_model("llama-3-8b"), 17 if engine == "llama.cpp" else 16
    one, two = (
        estimate(spec, context_tokens=8192, engine=engine, pipeline_parallel_size=n, devices=find_devices(f"h100x{n}"))
        for n in (1, 2)
    )
    held = one["kv_cache"]["bytes_per_device"]
    assert held % 32 == 0
    # With llama.cpp, `fit` is about the device with the least free memory: the second, which has the output.
    there = 15 if engine == "llama.cpp" else largest
    assert two["kv_cache"]["bytes_per_device"] == held * largest // 32
    assert two["fit"]["kv_cache_bytes"] == held * there // 32
    assert two["kv_cache"]["devices_total_bytes"] == two["kv_cache"]["total_bytes"] == held
    assert two["fit"]["max_batch_size"] > 1.5 * one["fit"]["max_batch_size"]
    assert two["fit"]["memory_context_tokens"] > 1.5 * one["fit"]["max_context_tokens"]
    for parts in ("request_lines", "pool_lines"):
        if parts in two["engine"]:
            assert sum(line["bytes"] for line in two["engine"][parts]) == two["kv_cache"]["bytes_per_device"]


def test_stages_and_ranks_divide_the_same_cache() -> None:
    cache = estimate(
        kvcalc.load_model("llama-3-70b"), engine="sglang", tensor_parallel_size=4, pipeline_parallel_size=2
    )["kv_cache"]
    assert cache["bytes_per_device"] == cache["total_bytes"] // 8
    assert cache["devices_total_bytes"] == cache["total_bytes"]


@pytest.mark.parametrize("engine", WITH_STAGES)
def test_more_stages_than_layers_are_a_usage_error(engine: str) -> None:
    with pytest.raises(UsageError, match="the model has 32 layers"):
        estimate(kvcalc.load_model("llama-3-8b"), engine=engine, pipeline_parallel_size=33)
    estimate(kvcalc.load_model("llama-3-8b"), engine=engine, pipeline_parallel_size=32)


def test_a_stage_is_laid_out_by_what_the_whole_model_has() -> None:
    # gpt-oss's 24 layers alternate, so a stage with one layer has only a window, or none.
    for engine in ("sglang", "llama.cpp"):
        spec = kvcalc.load_model("gpt-oss-20b")
        found = estimate(spec, context_tokens=8192, engine=engine, pipeline_parallel_size=spec.num_layers)
        assert found["kv_cache"]["devices_total_bytes"] == found["kv_cache"]["total_bytes"]


def test_an_encoder_is_cut_like_other_models() -> None:
    # llama.cpp counts the output as a layer of the last stage, so the first stage has 7 of 12 layers.
    found = estimate(
        kvcalc.load_model("bert-base"), engine="llama.cpp", devices=kvcalc.find_devices("h100x2"),
        context_tokens=512, tensor_parallel_size=1, pipeline_parallel_size=2,
    )  # fmt: skip
    assert found["fit"]["weights_bytes"] == 198_460_416  # in fp32
