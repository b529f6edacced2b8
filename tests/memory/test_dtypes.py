"""Element types: bits, scales and names."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, bytes_of, check_rows, parse_dtype, parse_weight_dtype

BITS_WITH_SCALES: dict[str, Fraction | int] = {
    "fp32": 32,
    "fp16": 16,
    "bf16": 16,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
    "mxfp8": Fraction(33, 4),
    "mxfp4": Fraction(17, 4),
    "nvfp4": Fraction(9, 2),
    "q8_0": Fraction(17, 2),
    "q5_1": 6,
    "q5_0": Fraction(11, 2),
    "q4_1": 5,
    "q4_0": Fraction(9, 2),
    "iq4_nl": Fraction(9, 2),
}


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_of_a_whole_number_of_blocks(name: str) -> None:
    assert bytes_of(3200, DTYPES[name]) == Fraction(3200, 8) * BITS_WITH_SCALES[name]


@pytest.mark.parametrize("text", ["bfloat16", "BF16", "float16", "half", "F32", "fp8_e4m3", "FP8_E5M2", "float"])
def test_other_spellings(text: str) -> None:
    assert parse_dtype(text, "--dtype").name in ("bf16", "fp16", "fp32", "fp8")


def test_an_unknown_dtype_offers_the_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        parse_dtype("bf61", "--kv-dtype")
    assert "bf16" in (caught.value.hint or "")


def test_only_16_and_32_bits_are_what_a_model_computes_in() -> None:
    assert {name for name, dtype in DTYPES.items() if dtype.is_float} == {"fp32", "fp16", "bf16"}


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(UsageError):
        bytes_of(33, DTYPES["q8_0"])
    with pytest.raises(UsageError, match="row of 33"):
        check_rows((64, 33), DTYPES["q4_0"])
    check_rows((64, 32), DTYPES["q4_0"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("awq", "did you mean int4?"), ("GPTQ", "did you mean int4?"), ("w8a8", "did you mean int8?"),
        ("q4", "did you mean q4_k_m?"), ("q6", "did you mean q6_k?"), ("q4_k_n", "did you mean q4_k_s or q4_k_m"),
        ("mlx-4bits", "did you mean mlx-4bit"),
    ],
)  # fmt: skip
def test_a_type_of_weights_that_is_nearly_right_is_named(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="not a dtype") as raised:
        parse_weight_dtype(text)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(hint)


def test_what_is_no_type_at_all_lists_those_of_weights_and_of_a_cache() -> None:
    with pytest.raises(UsageError) as raised:
        parse_weight_dtype("zzzzzzzz")
    assert all(name in str(raised.value.hint) for name in ("bf16", "q4_k_m", "mlx-4bit"))
    with pytest.raises(UsageError) as raised:
        parse_dtype("awq", "--kv-dtype")
    assert "int4" in str(raised.value.hint)
    with pytest.raises(UsageError) as raised:
        parse_dtype("q4", "--kv-dtype")
    assert "q4_k_m" not in str(raised.value.hint)
