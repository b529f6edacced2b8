"""SGLang's and TensorRT-LLM's DP ranks and pipeline stages: their settings, their tokens and their logs."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.throughput.hardware import find_devices
from tests.documents import audit, estimate
from tests.engines.models import plain
from tests.engines.test_sglang_drafts import QWEN


def ask(name: str, **asked: Any) -> dict[str, Any]:
    spec = kvcalc.read_config(QWEN, "qwen3.5-9b", "") if name == "qwen3.5-9b" else kvcalc.load_model(name)
    asked = {"engine": "sglang", "context_tokens": 8192, **asked}
    return estimate(spec, **asked)


def test_an_dp_rank_runs_its_part_of_the_requests() -> None:
    """SGLang's --max-running-requests counts the requests of all replicas: 64 of 8 are 8 of each."""
    sizes: dict[str, Any] = {"data_parallel_size": 8, "tensor_parallel_size": 1, "batch_size": 16}
    tables = [
        {line["name"]: line["bytes"] for line in ask("deepseek-v3", **one)["engine"]["pool_lines"]}["request table"]
        for one in (
            {**sizes, "engine_settings": {"max-running-requests": "64"}},
            {"batch_size": 2, "engine_settings": {"max-running-requests": "8"}},
        )
    ]
    assert tables[0] == tables[1] == 9 * (163_840 + 4) * 4


def test_the_windows_of_deepseek_v4_are_those_of_a_replicas_requests() -> None:
    found = ask("deepseek-v4-flash", data_parallel_size=8, tensor_parallel_size=1, batch_size=8)["engine"]
    assert found["swa_max_total_num_tokens"] == 32 * 768 + 2 * 1024 + 256 + 4 * 32 * 384
    few = ask("deepseek-v4-flash", data_parallel_size=2, tensor_parallel_size=1, batch_size=2,
              engine_settings={"max-running-requests": "16"})["engine"]  # fmt: skip
    assert few["swa_max_total_num_tokens"] == 8 * 768 + 2 * 4096 + 256 + 4 * 8 * 384


def test_a_replica_keeps_states_for_its_own_requests() -> None:
    """A hybrid with experts: 32 requests and 40 states on 4 replicas are 8 and 10 of each."""
    settings = {"max-running-requests": "32", "max-mamba-cache-size": "40"}
    asked = Speculation("mtp", 3)
    four = ask("qwen3.5-35b-a3b", data_parallel_size=4, tensor_parallel_size=1, batch_size=4, speculative=asked,
               engine_settings=settings)  # fmt: skip
    one = ask("qwen3.5-35b-a3b", speculative=asked,
              engine_settings={"max-running-requests": "8", "max-mamba-cache-size": "10"})  # fmt: skip
    assert four["engine"]["pool_lines"] == one["engine"]["pool_lines"]


def test_the_tokens_of_the_pool_are_the_least_of_any_stage() -> None:
    """62 layers on 4 devices: two stages have 16 layers, and their tokens count for all."""
    config = plain(62, 32, 8, 128)
    spec = kvcalc.read_config(config, "model", "")
    memory = 10 * 2**30
    asked: dict[str, Any] = {"engine": "sglang", "context_tokens": 4096, "kv_memory_bytes": memory}
    found = estimate(spec, pipeline_parallel_size=4, **asked)["engine"]
    assert found["kv_cache_tokens"] == memory // (16 * 2 * 8 * 128 * 2)


def test_every_stage_leaves_room_for_the_most_states() -> None:
    """Qwen3.5-9B in 3 stages of 10, 11 and 11 layers, with 2, 3 and 3 layers of attention and 8, 8 and 8 states."""
    memory, states = 10 * 2**30, 9
    found = ask("qwen3.5-9b", pipeline_parallel_size=3, kv_memory_bytes=memory,
                engine_settings={"max-mamba-cache-size": str(states)})["engine"]  # fmt: skip
    state = 8 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert found["kv_cache_tokens"] == (memory - (states + 1) * state) // (3 * 2 * 4 * 256 * 2)


STAGES = """\
server_args=ServerArgs(model_path='x', tp_size=1, pp_size=3)
[2025-10-01 TP0 PP0] KV Cache is allocated. #tokens: 100000, K size: {first} GB, V size: {first} GB
[2025-10-01 TP0 PP2] KV Cache is allocated. #tokens: 100000, K size: {last} GB, V size: {last} GB
[2025-10-01 TP0 PP0] max_total_num_tokens=100000, chunked_prefill_size=8192
"""


@pytest.mark.parametrize(("first", "unexplained"), [("1.91", 0), ("2.10", 1), ("2.00", 2)])
def test_the_lines_of_each_stage_are_checked(first: str, unexplained: int) -> None:
    """32 layers in stages of 10, 11 and 11 layers of 8 x 128 elements."""
    log = STAGES.format(first=first, last="2.10" if first != "2.10" else "2.50")
    spec = kvcalc.read_config(plain(32, 32, 8, 128), "model", "")
    found = audit(log, "log", model=spec, engine="sglang")
    assert found["workload"]["pipeline_parallel_size"] == 3
    assert found["unexplained"] == 2 * min(unexplained, 1)


def test_tensorrt_llms_stages_and_dp_ranks() -> None:
    spec = kvcalc.load_model("deepseek-v3")
    token = 61 * 576
    log = "tensor_parallel_size=8 enable_attention_dp=true kv_cache_dtype=fp8 tokens_per_block=32\n"
    size = round(320_000 * token / 2**30, 2)
    found = audit(f"{log}Allocated {size} GiB for max tokens in paged KV cache (320000).", "log", model=spec)
    assert (found["unexplained"], found["equal"], found["workload"]["tensor_parallel_size"]) == (0, 1, 1)
    # 62 layers in stages of 16, 16, 15 and 15 layers.
    spec = kvcalc.read_config(plain(62, 32, 8, 128), "model", "")
    lines = [
        f"Allocated {320_000 * layers * 4096 / 2**30:.2f} GiB for max tokens in paged KV cache (320000)."
        for layers in (16, 15)
    ]
    found = audit("\n".join(["pipeline_parallel_size=4 tokens_per_block=32", *lines]), "log", model=spec)
    assert (found["unexplained"], found["equal"]) == (0, 2)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm"])
def test_replicas_and_stages_are_in_every_answer(engine: str) -> None:
    """Estimate with a device: the cache, the fit and the speed of 4 replicas, and of 4 stages."""
    devices = find_devices("h200x4")
    model = kvcalc.load_model("qwen3-30b-a3b")
    speed = kvcalc.SpeedQuestion(input_tokens=4000, output_tokens=96, concurrency=16)
    one, replicas, stages = (
        estimate(model, devices=devices, engine=engine, speed=speed, **more)
        for more in (
            {"tensor_parallel_size": 4},
            {"tensor_parallel_size": 1, "data_parallel_size": 4},
            {"tensor_parallel_size": 1, "pipeline_parallel_size": 4},
        )
    )
    each = 48 * 2 * 4 * 128 * 2
    for found, token in ((one, each // 4), (replicas, each), (stages, each // 4)):
        assert found["fit"]["fits"]
        assert found["throughput"]["serving"]["tokens_per_second"] > 0
        assert found["engine"]["bytes_per_block"] == token * found["engine"]["block_size"]
    assert replicas["fit"]["weights_bytes"] > one["fit"]["weights_bytes"]
