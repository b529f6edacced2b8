"""llama.cpp's file types, compared with the sizes of published files."""

from __future__ import annotations

import pytest

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import FILE_TYPES, parse_dtype, parse_weight_dtype
from kvcalc.memory.quantization.gguf_types import k_quant_scheme
from kvcalc.memory.weights import quantized_bytes
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import weights_of


def file_bytes(name: str, file_type: str) -> int:
    spec = load_model(name)
    weights = weights_of(spec)
    assert weights is not None
    scheme = k_quant_scheme(file_type, spec.num_layers)
    return quantized_bytes(weights, parse_dtype("fp32", "x"), scheme)[0]


# Sizes of files on the Hugging Face Hub, in GB with two decimals: TheBloke/Llama-2-7B-GGUF and -70B-GGUF, and
# bartowski's Meta-Llama-3-8B-Instruct-GGUF, Llama-3.2-3B-Instruct-GGUF and Qwen2.5-14B-Instruct-GGUF.
@pytest.mark.parametrize(
    ("name", "file_type", "gigabytes"),
    [
        ("llama-2-7b", "q4_k_m", 4.08), ("llama-2-7b", "q4_k_s", 3.86), ("llama-2-7b", "q5_k_m", 4.78),
        ("llama-2-7b", "q5_k_s", 4.65), ("llama-2-7b", "q6_k", 5.53), ("llama-2-70b", "q4_k_m", 41.42),
        ("llama-3-8b", "q4_k_m", 4.92), ("llama-3-8b", "q4_k_s", 4.69), ("llama-3-8b", "q5_k_m", 5.73),
        ("llama-3-8b", "q6_k", 6.60), ("llama-3.2-3b", "q4_k_m", 2.02), ("qwen2.5-14b", "q4_k_m", 8.99),
    ],
)  # fmt: skip
def test_the_size_is_that_of_published_files(name: str, file_type: str, gigabytes: float) -> None:
    # A file also has a header with the vocabulary, a few megabytes, which is not counted as weights.
    assert file_bytes(name, file_type) / 1e9 == pytest.approx(gigabytes, abs=0.013)


def test_more_bits_are_more_bytes() -> None:
    sizes = [file_bytes("llama-3-8b", name) for name in ("q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")]
    assert sizes == sorted(set(sizes))


def test_weights_may_be_of_a_file_type_and_a_cache_may_not() -> None:
    for text, name in (("Q4_K_M", "q4_k_m"), ("bf16", "bf16")):
        found = parse_weight_dtype(text)
        assert found is not None
        assert found.name == name
    for name in FILE_TYPES:
        with pytest.raises(UsageError):
            parse_dtype(name, "--kv-dtype")


def test_estimate_takes_a_file_type(kvcalc: object) -> None:
    assert callable(kvcalc)
    weights = kvcalc("estimate", "llama-3-8b", "--dtype", "q4_k_m", "--json").json["weights"]
    assert weights["dtype"] == "q4_k_m"
    assert weights["bytes"] == pytest.approx(4.912e9, rel=2e-3)
