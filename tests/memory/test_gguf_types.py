"""What `--dtype` means under llama.cpp: a GGUF file, compared with the sizes of published files."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.memory.dtypes import GGUF_TYPES, parse_weight_dtype
from kvcalc.memory.quantization.gguf_types import count_experts, file_type_scheme
from tests.documents import estimate

GIB = 2**30


def weights(name: str, dtype: str | None, engine: str = "llama.cpp") -> dict[str, Any]:
    found: dict[str, Any] = estimate(kvcalc.load_model(name), context_tokens=64, engine=engine, dtype=dtype)["weights"]
    return found


# Sizes that llama-bench prints, in GiB with two decimals.
@pytest.mark.parametrize(
    ("name", "dtype", "gibibytes"),
    [
        ("gpt-oss-20b", None, 11.27), ("gpt-oss-120b", None, 59.02), ("gpt-oss-20b", "mxfp4", 11.27),
        ("qwen3-30b-a3b", "q8_0", 30.25), ("llama-2-7b", "q4_0", 3.56), ("llama-3.1-8b", "q8_0", 7.95),
    ],
)  # fmt: skip
def test_the_size_is_what_llama_bench_prints(name: str, dtype: str | None, gibibytes: float) -> None:
    assert weights(name, dtype)["bytes"] / GIB == pytest.approx(gibibytes, abs=0.006)


# Sizes of files on the Hugging Face Hub, in GB with two decimals: ggml-org/gpt-oss-20b-GGUF, TheBloke/Llama-2-7B-GGUF,
# -70B-GGUF and Mixtral-8x7B-v0.1-GGUF, and bartowski's gemma-2-9b-it-GGUF, Qwen2.5-14B-Instruct-GGUF and
# Llama-3.2-3B-Instruct-GGUF. A file also has a header with the vocabulary, a few megabytes.
@pytest.mark.parametrize(
    ("name", "dtype", "gigabytes"),
    [
        ("gpt-oss-20b", None, 12.11), ("llama-2-7b", "q5_0", 4.65), ("llama-2-7b", "q8_0", 7.16),
        ("llama-2-70b", "q4_0", 38.87), ("mixtral-8x7b", "q4_0", 26.44), ("gemma-2-9b", "q8_0", 9.83),
        ("qwen2.5-14b", "q8_0", 15.70), ("llama-3.2-3b", "q8_0", 3.42),
    ],
)  # fmt: skip
def test_the_size_is_that_of_published_files(name: str, dtype: str | None, gigabytes: float) -> None:
    assert weights(name, dtype)["bytes"] / 1e9 == pytest.approx(gigabytes, abs=0.015)


def test_the_document_names_the_type_without_a_prefix() -> None:
    assert weights("llama-2-7b", "Q8_0")["dtype"] == "q8_0"
    assert weights("gpt-oss-20b", None)["dtype"] == "mxfp4"


@pytest.mark.parametrize("engine", ["logical", "vllm", "transformers"])
def test_other_engines_keep_the_head_and_the_embedding_in_16_bits(engine: str) -> None:
    assert weights("llama-2-7b", "q8_0", engine)["bytes"] > weights("llama-2-7b", "q8_0")["bytes"]
    assert weights("gpt-oss-20b", None, engine)["bytes"] > weights("gpt-oss-20b", None)["bytes"]


def test_mxfp4_is_a_file_type_for_models_with_experts_only() -> None:
    dense = weights("llama-2-7b", "mxfp4")["bytes"]
    assert dense == weights("llama-2-7b", "mxfp4", "logical")["bytes"]
    assert count_experts(kvcalc.load_model("llama-2-7b")) == 0
    assert count_experts(kvcalc.load_model("gpt-oss-20b")) == 32


@pytest.mark.parametrize(
    ("module", "role", "name", "expected"),
    [
        ("gpt-oss-20b", "head", "gguf-mxfp4", "q8_0"), ("llama-2-7b", "head", "gguf-q4_0", "q6_k"),
        ("llama-2-7b", "head", "gguf-q8_0", "q8_0"), ("falcon-7b", "head", "gguf-q4_0", "q8_0"),
        ("gpt-oss-20b", "head", "gguf-q4_0", "q8_0"), ("llama-2-7b", "norm", "gguf-q4_0", "fp32"),
        ("gpt-oss-20b", "router", "gguf-mxfp4", "fp32"), ("llama-2-7b", "embedding", "gguf-q4_0", "q4_0"),
    ],
)  # fmt: skip
def test_the_type_of_matrices_outside_the_layers(module: str, role: str, name: str, expected: str) -> None:
    found = file_type_scheme(name, kvcalc.load_model(module)).format_of("x", role)
    assert found is not None
    assert found.name == expected


def test_eight_experts_keep_k_and_v_in_8_bits() -> None:
    few, many = (file_type_scheme("gguf-q4_0", kvcalc.load_model(name)) for name in ("mixtral-8x7b", "qwen3-30b-a3b"))
    for scheme, expected in ((few, "q8_0"), (many, "q4_0")):
        found = scheme.format_of("model.layers.3.self_attn.v_proj", "linear")
        assert found is not None
        assert found.name == expected


def test_iq4_nl_has_more_bits_in_shared_values() -> None:
    """Without an importance matrix, the first down-projections have more too. Published files are made with one."""
    scheme = file_type_scheme("gguf-iq4_nl", kvcalc.load_model("llama-3.1-8b"))
    for module, expected in (
        ("0.mlp.down_proj", "iq4_nl"),
        ("9.self_attn.v_proj", "q5_k"),
    ):
        found = scheme.format_of(f"model.layers.{module}", "linear")
        assert found is not None
        assert found.name == expected


def test_a_file_type_may_also_be_asked_for_by_its_own_name() -> None:
    for name, dtype in GGUF_TYPES.items():
        assert parse_weight_dtype(name.upper()) == dtype
    assert weights("llama-2-7b", "gguf-q8_0", "vllm")["bytes"] == weights("llama-2-7b", "q8_0")["bytes"]
