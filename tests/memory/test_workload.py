"""Defaults and notes: context, dtype and tensor parallelism."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.memory.workload import resolve_workload
from kvcalc.model.layout import Layout

LLAMA = kvcalc.load_model("llama-3-8b")


@pytest.mark.parametrize(
    ("model", "context"), [("llama-3-8b", 4096), ("llama-7b", 2048), ("bert-base", 512), ("deepseek-v3", 4096)]
)
def test_context_is_4096_or_the_models_maximum(model: str, context: int) -> None:
    assert resolve_workload(kvcalc.load_model(model)).context_tokens == context


def test_context_of_a_model_without_maximum_is_4096() -> None:
    assert resolve_workload(LLAMA._replace(max_position_embeddings=None)).context_tokens == 4096


def test_beyond_the_maximum_the_figure_is_exact_with_a_warning() -> None:
    workload = resolve_workload(LLAMA, 8193)
    assert workload.context_tokens == 8193
    assert "8,192" in workload.notes[0].text
    assert resolve_workload(LLAMA, 8192).notes == ()


@pytest.mark.parametrize(
    ("torch_dtype", "dtype", "kv_dtype", "expected"),
    [
        ("bf16", None, "auto", "bf16"), ("fp16", None, "auto", "fp16"), ("bf16", "fp32", "auto", "fp32"),
        ("fp16", "fp8", "auto", "fp16"), ("bf16", "int4", "auto", "bf16"), (None, None, "auto", "bf16"),
        (None, "nvfp4", "auto", "bf16"), ("fp16", "bf16", "fp8", "fp8"), ("bf16", None, "AUTO", "bf16"),
        ("bf16", None, "q8_0", "q8_0"),
    ],
)  # fmt: skip
def test_the_caches_dtype(torch_dtype: str | None, dtype: str | None, kv_dtype: str, expected: str) -> None:
    workload = resolve_workload(LLAMA._replace(torch_dtype=torch_dtype), dtype=dtype, kv_dtype=kv_dtype)
    assert workload.kv_dtype.name == expected
    assert any("names no dtype" in n.text for n in workload.notes) == (torch_dtype is None)


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3-70b", 3), ("llama-3-70b", 128), ("falcon-7b", 2), ("deepseek-v3", 3)]
)
def test_devices_must_divide_the_heads(model: str, tp: int) -> None:
    with pytest.raises(UsageError, match="does not divide"):
        resolve_workload(kvcalc.load_model(model), layout=Layout(tp))


def test_kv_heads_that_split_unevenly_are_refused() -> None:
    config = {
        "model_type": "generic",
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 8,
    }
    with pytest.raises(UsageError, match="KV heads"):
        resolve_workload(kvcalc.read_config(config, "x", "x"), layout=Layout(4))


@pytest.mark.parametrize(
    ("model", "tp"), [("llama-3-70b", 8), ("llama-3-70b", 64), ("deepseek-v3", 128), ("falcon-7b", 71)]
)
def test_replication_is_allowed(model: str, tp: int) -> None:
    assert resolve_workload(kvcalc.load_model(model), layout=Layout(tp)).layout.tensor_parallel_size == tp
