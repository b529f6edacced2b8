"""SGLang's prefill context parallelism: copies of the attention, each with all rows of all requests.

attn_tp_size is tp_size / attn_cp_size (derive_attn_tp_size, srt/runtime_context.py, SGLang 0.5.23). Experts, the head
and the embedding are split over tp_size, and so are MLPs, except with MLA without an indexer (moe_dense_tp_size 1).
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import KvcalcError, LayoutError, ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.planning.plan.document import Targets, plan
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_devices, find_gpu
from tests.documents import estimate

V32, R1, QWEN = "deepseek-v3.2", "deepseek-r1", "qwen3-235b-a22b"


def ask(name: str, copies: int = 1, gpus: str = "h200x8", **asked: Any) -> dict[str, Any]:
    given = {"attn-cp-size": str(copies)} | asked.pop("settings", {})
    asked = {"context_tokens": 32768, "dtype": "bf16", **asked}
    return estimate(
        kvcalc.load_model(name), devices=find_devices(gpus), engine="sglang", engine_settings=given, **asked
    )


def test_a_copy_has_the_heads_and_rows_of_fewer_devices() -> None:
    """Two copies on four devices each: 16 of 64 query heads and one of 4 KV heads, of 128 values. No expert moves."""
    one, two, eight = (ask(QWEN, copies, batch_size=4) for copies in (1, 2, 8))
    assert (two["engine"]["tensor_parallel_size"], two["engine"]["expert_parallel_size"]) == (4, 8)
    assert (two["hardware"]["num_devices"], two["hardware"]["replicas"]) == (8, 1)
    # 8 devices have two copies of each KV head, so K and V are the same on 4.
    assert two["engine"]["request_bytes"] == one["engine"]["request_bytes"] == eight["engine"]["request_bytes"] // 4
    assert two["kv_cache"]["total_bytes"] == one["kv_cache"]["total_bytes"]
    assert two["fit"]["weights_bytes"] - one["fit"]["weights_bytes"] == 94 * 2 * 4096 * (16 - 8) * 128 * 2
    for found in (two, eight):
        assert sum(line["bytes"] for line in found["fit"]["lines"]) == found["fit"]["device_bytes"]


def test_mla_without_an_indexer_has_whole_mlps_on_every_device() -> None:
    """Of an expert layer: the shared expert, 7/8 of it more. Of 3 layers: the MLP. Of all 61: the attention's heads."""
    one, eight = (ask(R1, copies, gpus="b300x8")["fit"]["weights_bytes"] for copies in (1, 8))
    heads = 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
    mlps = 3 * 3 * 7168 * 18432 + 58 * 3 * 7168 * 2048
    assert eight - one == 2 * (61 * heads + mlps) * 7 // 8


def test_sparse_attention_divides_heads_within_a_copy() -> None:
    one, two = (ask(V32, copies, gpus="b300x8")["fit"]["weights_bytes"] for copies in (1, 2))
    assert two - one == 2 * 61 * 128 * (1536 * 192 + 512 * 256 + 128 * 7168) // 8


def test_a_prompt_is_divided_and_a_decode_step_is_not() -> None:
    asked: dict[str, Any] = {"batch_size": 8, "tensor_parallel_size": 1}
    one = ask("qwen3-30b-a3b", gpus="h200", **asked)["throughput"]
    two = ask("qwen3-30b-a3b", 2, gpus="h200x2", **asked)["throughput"]
    assert two["prefill_seconds"] < 0.75 * one["prefill_seconds"]
    assert two["parts"]["kv_seconds"] == pytest.approx(one["parts"]["kv_seconds"])


def test_a_plan_starts_the_copies() -> None:
    for name, strategy in ((V32, "interleave"), (QWEN, "zigzag")):
        row: Any
        (row,) = plan(
            Question(kvcalc.load_model(name), engine_settings={"attn-cp-size": "2"}), [find_gpu("h200")],
            one_length(8192, 500), Targets(4, None), engines=("sglang",),
        )["plans"]  # fmt: skip
        words = row["sglang"].split()
        assert int(words[words.index("--tp-size") + 1]) == 2 * row["tensor_parallel_size"]
        assert f"--enable-prefill-cp --cp-strategy {strategy} " in row["sglang"]
        assert "--attn-cp-size 2" in row["sglang"]


@pytest.mark.parametrize(
    ("name", "asked", "error", "text"),
    [
        ("llama-3-70b", {}, ModelError, "is modelled only for"),
        ("nemotron-3-nano", {}, ModelError, "SGLang does not run Nemotron-H"),
        (R1, {}, LayoutError, "--attn-cp-size 2 --tp 4: SGLang then keeps MLA without an indexer whole"),
        (V32, {"gpus": "h200x16"}, LayoutError, "on 8 devices at most"),
        (QWEN, {"pipeline_parallel_size": 2}, UsageError, "not modelled with pipeline stages"),
        (QWEN, {"data_parallel_size": 2}, UsageError, "not modelled with DP ranks"),
        (R1, {"speculative": Speculation("mtp", 3, 1.5)}, UsageError, "not modelled with --attn-cp-size"),
    ],
)
def test_what_is_refused(name: str, asked: dict[str, Any], error: type[KvcalcError], text: str) -> None:
    with pytest.raises(error, match=text):
        ask(name, 2, **asked)
