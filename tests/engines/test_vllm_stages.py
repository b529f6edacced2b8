"""vLLM with pipeline stages: the check before the start in every release, uneven stages, and logs."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError
from tests.documents import estimate

GIB = 1 << 30
QWEN = "qwen3-30b-a3b"  # 48 layers of 4 heads of 128: 98,304 bytes a token in bf16


def ask(release: str, tokens: int = 32_768, **asked: Any) -> dict[str, Any]:
    options = asked.pop("settings", {})
    return estimate(
        kvcalc.load_model(QWEN), engine=f"vllm{release}", context_tokens=tokens, dtype="bf16",
        pipeline_parallel_size=2, engine_settings=options, **asked,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("release", "longest"),
    [
        # A stage with 3 GiB holds 65,536 tokens of its 24 layers.
        ("", 65_536), ("@0.17", 65_536), ("@0.13", 65_536),
        # 0.14 to 0.16 asked for the memory of all 48 layers. V0 has two schedulers with half of the blocks each.
        ("@0.16", 32_768), ("@0.14", 32_768), ("@0.7", 32_768),
    ],
)  # fmt: skip
def test_the_longest_request_of_a_stage(release: str, longest: int) -> None:
    fit = ask(release, kv_memory_bytes=3 * GIB)["fit"]
    assert fit["memory_context_tokens"] == longest
    assert fit["kv_cache_bytes"] == 32_768 * 98_304 // 2
    assert fit["fits"]
    notes = [note["code"] for note in ask(release, kv_memory_bytes=3 * GIB)["warnings"]]
    assert ("stage-memory" in notes) is (longest == 32_768)
    longer = ask(release, longest + 1, kv_memory_bytes=3 * GIB)["fit"]
    assert (longer["fits"], longer["memory_context_tokens"]) == (False, longest)


def test_one_stage_is_billed_as_usual() -> None:
    for release in ("@0.16", "@0.7"):
        found = estimate(
            kvcalc.load_model(QWEN), engine=f"vllm{release}", context_tokens=4096, dtype="bf16", kv_memory_bytes=3 * GIB
        )
        assert found["fit"]["memory_context_tokens"] == 32_768


def test_the_verdict_names_the_memory_of_all_layers() -> None:
    devices = kvcalc.find_devices("h100x2")
    found = ask("@0.16", 40_960, devices=devices, batch_size=1, kv_memory_bytes=3 * GIB)
    words = [note["text"] for note in found["warnings"]]
    assert any("40,960 tokens needs 3.75 GiB of cache per device, but only 3.00 GiB" in text for text in words)


def test_uneven_stages() -> None:
    # VLLM_PP_LAYER_PARTITION=16,32: the second stage has twice as many layers, and weights, as the first.
    even, uneven = (
        ask("", devices=kvcalc.find_devices("h200x2"), settings=settings)
        for settings in ({}, {"pp-layer-partition": "16,32"})
    )
    assert even["engine"]["pp_layer_partition"] is None
    assert uneven["engine"]["pp_layer_partition"] == "16,32"
    assert even["engine"]["bytes_per_block"] == 24 * 16 * 2048
    assert uneven["engine"]["bytes_per_block"] == 32 * 16 * 2048
    assert uneven["kv_cache"]["devices_total_bytes"] == even["kv_cache"]["devices_total_bytes"]
    layer = (uneven["fit"]["weights_bytes"] - even["fit"]["weights_bytes"]) / 8
    assert 1.2e9 < layer < 1.3e9


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ("16,16,16", "has 3 stages, but --pp is 2"),
        ("16,31", "the model has 48"),
        ("16;32", "not numbers of the model's"),
    ],
)
def test_partitions_that_vllm_refuses(partition: str, words: str) -> None:
    with pytest.raises(KvcalcError, match=words):
        ask("", settings={"pp-layer-partition": partition})


def test_a_log_of_v1_with_stages() -> None:
    """Lines of vllm-project/vllm#34076: the check of 0.15.2 counts all layers, whatever the partition."""
    found = kvcalc.audit(
        "VLLM_PP_LAYER_PARTITION=16,32 vllm serve Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8 --pipeline-parallel-size 2\n"
        "vLLM API server version 0.15.2rc1.dev93+g11a4c9d30\n"
        "ValueError: To serve at least one request with the models's max seq len (262144), (24.0 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available memory, the "
        "estimated maximum model length is 34736.\n",
        model=QWEN,
    )
    assert (found["equal"], found["unexplained"]) == (2, 0)
    assert found["engine"]["settings"]["pp-layer-partition"] == "16,32"


def test_a_list_of_stages_says_how_many_there_are() -> None:
    found = kvcalc.audit(
        "INFO Hidden layers were unevenly partitioned: [20,28]. This can be manually overridden\n"
        "vLLM API server version 0.20.0\nmax_model_len=32768\nAvailable KV cache memory: 3.50 GiB\n"
        "GPU KV cache size: 65,536 tokens\n",
        model=QWEN,
    )
    assert (found["equal"], found["unexplained"], found["workload"]["pipeline_parallel_size"]) == (1, 0, 2)


def test_a_log_of_v0_with_stages() -> None:
    """The swap space of 4 GiB has blocks of one stage: 40 layers of 4 heads, 1,310,720 bytes. A request has half of all
    blocks (vllm-project/vllm#7039). The lines are in the format of V0, not of a published log."""
    found = kvcalc.audit(
        "llm_engine.py:174] Initializing an LLM engine (v0.5.4) with config: "
        "model='meta-llama/Meta-Llama-3.1-70B-Instruct', dtype=torch.bfloat16, max_seq_len=8192, "
        "tensor_parallel_size=2, pipeline_parallel_size=2\n"
        "distributed_gpu_executor.py:56] # GPU blocks: 1650, # CPU blocks: 3276\n"
        "ValueError: the maximum number of tokens that can be stored in KV cache (13200).\n"
    )
    assert (found["equal"], found["unexplained"]) == (2, 0)


def test_a_refused_partition_says_what_to_type() -> None:
    with pytest.raises(KvcalcError) as refused:
        ask("", settings={"pp-layer-partition": "16,31"})
    assert refused.value.hint == "for example 24,24"
