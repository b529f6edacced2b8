"""vLLM's prefill context parallelism: copies of the attention that divide the tokens of a prompt.

ParallelConfig.world_size is PP x TP x PCP. Every copy gathers the latents of the whole prompt, so it holds the cache of
all requests, and the experts are divided over TP x PCP (FusedMoEParallelConfig.make, layers/fused_moe/config.py,
0.33.0).
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, LayoutError, ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.plan.document import Targets, plan
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_devices, find_gpu
from tests.documents import estimate

R1, V32 = "deepseek-r1", "deepseek-v3.2"
EXPERTS = 58 * 256 * 3 * (7168 * 2048 + 4 * 56 * 16)  # as in test_dp_ranks


# MLA without experts, whose groups would tell two layouts apart.
DENSE = {
    "model_type": "deepseek_v2", "n_routed_experts": None, "first_k_dense_replace": 32, "moe_intermediate_size": 768,
    "num_hidden_layers": 32, "hidden_size": 2048, "num_attention_heads": 16,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 6144, "vocab_size": 128256,
}  # fmt: skip


def ask(name: str | ModelSpec = R1, gpus: str = "h200x16", engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    names = {"pcp": "prefill-context-parallel-size", "dcp": "decode-context-parallel-size"}
    given = {names[key]: str(asked.pop(key)) for key in names if key in asked} | asked.pop("settings", {})
    devices = find_devices(gpus)
    model = kvcalc.load_model(name) if isinstance(name, str) else name
    return estimate(model, devices=devices, engine=engine, engine_settings=given, **asked)


def test_copies_hold_the_whole_cache_and_a_part_of_the_experts() -> None:
    two, one = ask(pcp=2, batch_size=16, context_tokens=8192), ask(gpus="h200x8", batch_size=16, context_tokens=8192)
    assert (two["engine"]["tensor_parallel_size"], two["engine"]["expert_parallel_size"]) == (8, 16)
    assert (two["hardware"]["num_devices"], two["hardware"]["replicas"]) == (16, 1)
    assert two["kv_cache"]["bytes_per_device"] == one["kv_cache"]["bytes_per_device"]
    assert two["kv_cache"]["devices_total_bytes"] == 2 * one["kv_cache"]["devices_total_bytes"]
    assert two["kv_cache"]["total_bytes"] == one["kv_cache"]["total_bytes"]
    assert one["fit"]["weights_bytes"] - two["fit"]["weights_bytes"] == EXPERTS // 8 - EXPERTS // 16
    assert sum(line["bytes"] for line in two["engine"]["request_lines"]) == two["engine"]["request_bytes"]
    assert sum(line["bytes"] for line in two["fit"]["lines"]) == two["fit"]["device_bytes"]


def test_with_decode_context_parallelism_the_copies_divide_the_cache() -> None:
    copies, divided = (ask(V32, pcp=2, dcp=dcp, context_tokens=32768)["engine"] for dcp in (1, 16))
    assert divided["request_bytes"] * 16 == copies["request_bytes"]


def test_a_prompt_is_divided_and_a_decode_step_is_not_slower() -> None:
    asked: dict[str, Any] = {"batch_size": 8, "context_tokens": 32768}
    for model in ("deepseek-v2-lite", read_config(DENSE, "dense", "test")):
        one, two = (ask(model, gpus, pcp=n, **asked)["throughput"] for gpus, n in (("h200", 1), ("h200x2", 2)))
        assert 0.45 * one["prefill_seconds"] < two["prefill_seconds"] < 0.75 * one["prefill_seconds"]
        assert two["parts"]["kv_seconds"] == pytest.approx(one["parts"]["kv_seconds"] / 2)


def test_the_number_of_devices_follows() -> None:
    assert ask(gpus="h200", pcp=8)["hardware"]["num_devices"] == 8
    assert ask(gpus="h200", pcp=2, tensor_parallel_size=4)["hardware"]["num_devices"] == 8
    assert ask(gpus="h200x16", pcp=2, data_parallel_size=2)["engine"]["tensor_parallel_size"] == 4
    with pytest.raises(UsageError, match="prefill context parallelism 3 does not divide 8 devices"):
        ask(gpus="h200x8", pcp=3)
    model = kvcalc.load_model(V32)
    (point,) = kvcalc.sweep(
        model, contexts=[4096], engines=["vllm"], gpus=["h200x8"],
        engine_settings={"prefill-context-parallel-size": "4"},
    )["points"]  # fmt: skip
    assert (point["tensor_parallel_size"], point["num_devices"]) == (2, 8)


def test_a_plan_starts_the_copies() -> None:
    settings = {"prefill-context-parallel-size": "2"}
    row: Any
    (row,) = plan(
        Question(kvcalc.load_model(V32), engine_settings=settings), [find_gpu("h200")], one_length(8192, 500),
        Targets(16, None), engines=("vllm",),
    )["plans"]  # fmt: skip
    assert row["num_devices"] == 2 * row["tensor_parallel_size"] * row["replicas"]
    assert "--prefill-context-parallel-size 2" in row["vllm"]


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"name": "llama-3-70b", "pcp": 2}, ModelError, "only for models with MLA in all layers"),
        ({"name": "kimi-linear-48b", "pcp": 2}, ModelError, "only for models with MLA in all layers"),
        ({"name": "kimi-k2.5", "pcp": 2}, ModelError, "with images"),
        ({"pcp": 2, "engine": "vllm@0.25"}, UsageError, "no attention kernel of this release"),
        ({"pcp": 2, "engine": "vllm@0.31", "pipeline_parallel_size": 2}, UsageError, "without pipeline stages"),
        ({"pcp": 2, "engine": "vllm@0.11"}, UsageError, "this release of vLLM has no such flag"),
        ({"pcp": 2, "dcp": 4}, LayoutError, "it must be 2 or 16"),
        ({"pcp": 2, "dcp": 2}, ModelError, "for sparse MLA only"),
        ({"pcp": 2, "settings": {"max-lora-rank": "8"}}, UsageError, "with LoRA"),
        ({"pcp": 2, "speculative": Speculation("ngram", 3, 1.5)}, UsageError, "does not support this"),
        ({"pcp": 2, "engine": "sglang"}, UsageError, "has no such setting"),
    ],
)
def test_what_vllm_refuses(asked: dict[str, Any], error: type[KvcalcError], text: str) -> None:
    with pytest.raises(error, match=text):
        ask(**{"name": R1, **asked})
