"""vLLM's tables of cosines and sines, against "Model loading took" of public logs."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

GIB = 2**30
MIB = 2**20


def fit(model: Any, gpu: str = "h100", engine: str = "vllm", **asked: Any) -> dict[str, Any]:
    found = kvcalc.load_model(model) if isinstance(model, str) else model
    answer: dict[str, Any] = estimate(found, devices=find_devices(gpu), engine=engine, **asked)["fit"]
    return answer


def tables(answer: dict[str, Any]) -> int | None:
    return {line["name"]: line["bytes"] for line in answer["lines"]}.get("rotary tables")


@pytest.mark.parametrize(
    ("model", "ranks", "loaded"),
    [
        ("llama-3.1-8b", 1, 14.99),
        ("llama-3.1-8b", 2, 7.51),  # every rank has the whole table
        ("llama-3.1-8b", 4, 3.77),
        ("qwen3-14b", 1, 27.52),
        ("qwen3-8b", 1, 15.27),
    ],
)
def test_the_weights_and_tables_are_those_that_vllm_loads(model: str, ranks: int, loaded: float) -> None:
    found = fit(model, f"h100x{ranks}", tensor_parallel_size=ranks)
    assert found["weights_bytes"] / GIB == pytest.approx(loaded, abs=0.006)


def test_a_table_has_a_row_for_every_position_that_the_model_has() -> None:
    # 10,485,760 positions of 128 dimensions in 16 bits, with a context of 4,096 tokens.
    answer = fit("llama-4-scout", "h100x8", tensor_parallel_size=8)
    assert tables(answer) == 2560 * MIB


def test_the_tables_of_a_rotation_in_parts_and_by_place() -> None:
    # A quarter of 256 dimensions. Those that rotate by the place in an image have four times the rows.
    assert tables(fit("qwen3-next-80b-a3b", "h100x4", tensor_parallel_size=4)) == 262144 * 64 * 2
    assert tables(fit("qwen3-vl-8b")) == 4 * 262144 * 128 * 2  # vllm-project/vllm#44738: 7/8 of it is 224 MiB
    # Gemma 4's sliding layers have heads of 256 dimensions, the others of 512; 7/8 of it is 336 MiB.
    assert tables(fit("gemma-4-31b")) == 262144 * (256 + 512) * 2
    assert tables(fit("deepseek-v3", "h200x8", tensor_parallel_size=8)) == 163840 * 64 * 2


@pytest.mark.parametrize(
    ("scaling", "rows"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 2.0}, 65536),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 32768 + 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, 16384),
        (None, 32768),
    ],
)
def test_the_rows_follow_the_scaling_that_the_config_states(scaling: dict[str, Any] | None, rows: int) -> None:
    config = {
        "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 1024,
        "max_position_embeddings": 32768, "rope_scaling": scaling,
    }  # fmt: skip
    assert tables(fit(kvcalc.read_config(config, "a model", "a test"))) == rows * 128 * 2


def test_other_engines_and_models_without_rotation_have_no_tables() -> None:
    assert tables(fit("llama-3.1-8b", engine="sglang")) is None
    assert tables(fit("gpt2")) is None
