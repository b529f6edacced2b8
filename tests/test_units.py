"""Sizes, rates, times and token counts: which texts are accepted and refused, and how printed numbers are rounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UsageError
from kvcalc.limits import TOKENS
from kvcalc.units import (
    Number,
    format_parameters,
    format_size,
    parse_bandwidth,
    parse_count,
    parse_flops,
    parse_seconds,
    parse_size,
    parse_tokens,
    parse_vllm_integer,
)
from tests.rows import every_row

Parse = Callable[[str, str], int]

LETTERS = "KMGTPE"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("85899345920", 80 * 2**30), ("80B", 80), ("80G", 80 * 10**9), ("80GB", 80 * 10**9), ("80g", 80 * 10**9),
        ("80Gi", 80 * 2**30), ("80GiB", 80 * 2**30), ("80 GiB", 80 * 2**30), ("1.5GiB", 3 * 2**29), ("1_000K", 10**6),
        ("0", 0), ("0.5k", 500), ("1E", 10**18), ("1EiB", 2**60),
    ],
)  # fmt: skip
def test_sizes_are_read_as_numfmt_reads_them(text: str, expected: int) -> None:
    assert parse_size(text, "--kv-memory") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8192", 8192), ("131_072", 131072), ("8k", 8192), ("8K", 8192), ("1M", 2**20), ("0.5k", 512)],
)
def test_tokens_are_powers_of_1024_in_either_case(text: str, expected: int) -> None:
    assert parse_tokens(text, "--context") == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("8192", 8192), ("8k", 8000), ("25.6k", 25600), ("8K", 8192), ("1m", 10**6), ("1M", 2**20)]
)
def test_vllm_reads_small_letters_as_powers_of_1000(text: str, expected: int) -> None:
    assert parse_vllm_integer(text, "--max-model-len") == expected


@given(st.integers(1, 10**18))
def test_a_number_is_read_as_it_is_printed(number: int) -> None:
    text = f"{number:,}"
    assert parse_size(f"{number + 2**20:,}", "--kv-memory") == number + 2**20
    assert parse_tokens(text, "--context") == number
    assert parse_vllm_integer(text, "--max-model-len") == parse_count(text, "x") == number


def test_a_size_may_have_separators_and_a_unit() -> None:
    assert parse_size("80,999MiB", "--gpu-memory") == parse_size("80999MiB", "--gpu-memory")
    assert parse_size("1,023.50 KiB", "--kv-memory") == 1_048_064


BAD_NUMBERS = [
    "8,19",
    "8,1920",
    "8192,000",
    ",192",
    "8,",
    "8,192,",
    "8,,192",
    "8,1_2",
    "1_000,000",
    "1,00.5",
    "1.000,5",
    ",",
    "",
    " ",
    "k",
    "8kk",
    "8 k k",
    "-5",
    "+5",
    "nan",
    "inf",
    "0x10",
    "1e3",
    "1__0",
    "_1",
    "1_",
    "5.",
    ".5",
    "1.2.3",
    "٣",
    "8\x00",
    "9" * 5000,
]


@every_row("text", BAD_NUMBERS)
@every_row("parse", [parse_size, parse_tokens, parse_vllm_integer, parse_count])
def test_what_is_no_number_is_refused_in_one_short_line(parse: Parse, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "--option")
    assert caught.value.message.startswith("--option ")
    assert len(caught.value.message) < 150
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_size, "0.3"),
        (parse_size, "5GiBB"),
        (parse_size, "80X"),
        (parse_size, "B"),
        (parse_tokens, "0"),
        (parse_tokens, "0.3"),
        (parse_vllm_integer, "1.5K"),
        (parse_vllm_integer, "1.5"),
        (parse_count, "0"),
        (parse_count, "1.5"),
        (parse_count, "8k"),
    ],
)
def test_near_misses_are_refused(parse: Parse, text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, "--option")


@given(st.integers(0, 7), st.sampled_from(["", *LETTERS]))
def test_size_letters_mean_their_powers(number: int, letter: str) -> None:
    power = LETTERS.index(letter) + 1 if letter else 0
    assert parse_size(f"{number}{letter or 'B'}", "x") == number * 1000**power
    if letter:
        assert parse_size(f"{number}{letter}i", "x") == number * 1024**power


@given(st.integers(1, TOKENS))
def test_plain_numbers_come_back_whatever_their_separators(number: int) -> None:
    assert parse_tokens(str(number), "x") == number
    assert parse_tokens(f"{number:_}", "x") == number
    assert parse_count(f"{number:_}", "x") == number


@pytest.mark.parametrize("parse", [parse_tokens, parse_count, parse_size, parse_vllm_integer])
def test_numbers_beyond_64_bits_are_refused(parse: Any) -> None:
    assert parse(str(TOKENS), "x") == TOKENS
    for text in (str(TOKENS + 1), "9" * 64):
        with pytest.raises(UsageError, match="at most 9,223,372,036,854,775,807"):
            parse(text, "x")


def _value_of(text: str) -> tuple[int, int]:
    """A printed size in hundredths of a byte, and the value of its last digit."""
    number, unit = text.split(" ")
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60}[unit]
    return round(float(number.replace(",", "")) * 100) * scale, scale if unit != "B" else 0


@given(st.integers(0, 2**69))
def test_requirements_are_rounded_up_and_capacities_down_by_less_than_a_digit(size: int) -> None:
    up, digit = _value_of(format_size(size))
    down, _ = _value_of(format_size(size, capacity=True))
    assert down <= size * 100 <= up
    assert up - size * 100 < max(digit, 1)
    assert size * 100 - down < max(digit, 1)


@given(st.integers(0, 2**69), st.integers(0, 2**69))
def test_a_larger_size_never_prints_as_less(a: int, b: int) -> None:
    small, large = sorted((a, b))
    assert _value_of(format_size(small))[0] <= _value_of(format_size(large))[0]


def test_the_unit_is_chosen_after_rounding() -> None:
    assert format_size(2**20 - 1) == "1.00 MiB"
    assert format_size(2**20 - 1, capacity=True) == "1,023.99 KiB"
    assert format_size(1023) == "1023 B"
    assert format_size(-(2**30)) == "-1.00 GiB"
    assert re.fullmatch(r"[\d,]+\.\d\d EiB", format_size(10**24))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"), (999, "999"), (1000, "1.0 K"), (124_439_808, "124.4 M"), (999_949_999, "999.9 M"),
        (999_950_000, "1.0 B"), (70_553_706_496, "70.6 B"), (1_026_408_209_408, "1.0 T"),
    ],
)  # fmt: skip
def test_parameters_are_rounded_to_the_nearest_tenth(value: int, shown: str) -> None:
    assert format_parameters(value) == shown


@pytest.mark.parametrize(("text", "expected"), [("5.98GiB", 6_420_976_107), ("0.1k", 100), ("1.0001k", 1000)])
def test_what_a_size_leaves_of_a_byte_is_dropped(text: str, expected: int) -> None:
    assert parse_size(text, "--kv-memory") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3.35TB/s", 3_350_000_000_000),
        ("900GB/s", 900 * 10**9),
        ("3350G", 3350 * 10**9),
        ("1 GiB/s", 2**30),
        ("7B/s", 7),
        ("3350000000000", 3_350_000_000_000),
    ],
)
def test_bandwidths(text: str, expected: int) -> None:
    assert parse_bandwidth(text, "--gpu-bandwidth") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("989T", 989 * 10**12), ("989.4 TFLOPS", 989_400 * 10**9), ("2.25P", 2_250 * 10**12), ("989e12", 989 * 10**12),
     ("1.5E12", 1_500 * 10**9), ("312 Tflop/s", 312 * 10**12)],
)  # fmt: skip
def test_rates_of_operations(text: str, expected: int) -> None:
    assert parse_flops(text, "--flops") == expected


@pytest.mark.parametrize("text", ["", "fast", "-1T", "0", "e12", "1e-3", "3.35TB/m", "nan", "1e999", "T"])
def test_no_rates(text: str) -> None:
    for parse in (parse_bandwidth, parse_flops):
        with pytest.raises(UsageError, match="--rate"):
            parse(text, "--rate")


@pytest.mark.parametrize(("text", "expected"), [("1.5s", 1.5), ("30ms", 0.03), ("30 MS", 0.03), ("200us", 0.0002)])
def test_times(text: str, expected: float) -> None:
    assert parse_seconds(text, "--max-tpot") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "0", "0ms", "-1s", "3d", "1e3s", "nan", "s", "9" * 5000])
def test_no_times(text: str) -> None:
    with pytest.raises(UsageError, match="not a time above 0"):
        parse_seconds(text, "--max-tpot")


# Numbers that are too small for the base unit, and the spellings that the error suggests.
WITHOUT_UNIT = [
    (parse_size, "80", "80GiB"), (parse_size, "1", "1GiB"), (parse_size, "0.5", "0.5GiB"), (parse_size, "1_0", "10GiB"),
    (parse_size, "1023", "1023GiB"), (parse_size, "1024", "1024MiB"), (parse_size, "81559", "81559MiB"),
    (parse_size, "1048575", "1048575MiB"),
    (parse_bandwidth, "3350", "3.35TB/s"), (parse_bandwidth, "3.35", "3.35TB/s"), (parse_bandwidth, "900", "900GB/s"),
    (parse_bandwidth, "864/s", "864GB/s"), (parse_bandwidth, "3350000", "3.35TB/s"), (parse_bandwidth, "7", "7TB/s"),
    (parse_bandwidth, "999999999", "999.999999TB/s"), (parse_bandwidth, "0.9", "900GB/s"),
    (parse_flops, "989", "989T"), (parse_flops, "989.4", "989.4T"), (parse_flops, "989400", "989.4T"),
    (parse_flops, "989 FLOPS", "989T"), (parse_flops, "989e3", "989T"), (parse_flops, "2.25", "2.25P or 2.25T"),
    (parse_flops, "989400000", "989.4T"),
    (parse_seconds, "30", "30ms or 30s"), (parse_seconds, "1.5", "1.5ms or 1.5s"), (parse_seconds, "0.03", "0.03s"),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "likely"), WITHOUT_UNIT)
def test_a_number_that_lacks_its_unit_is_refused_with_the_likely_spelling(
    parse: Callable[[str, str], float], text: str, likely: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "--option")
    assert caught.value.message.endswith(" needs a unit")
    assert caught.value.hint == f"did you mean {likely}?"
    for spelling in likely.split(" or "):
        assert parse(spelling, "--option") > 0


@pytest.mark.parametrize(
    ("parse", "least"), [(parse_size, 1024 * 1024), (parse_bandwidth, 10**9), (parse_flops, 10**9)]
)
def test_a_large_number_is_in_the_base_unit(parse: Parse, least: int) -> None:
    assert parse(str(least), "--option") == least
    assert parse(f"{least:_}", "--option") == least
    with pytest.raises(UsageError, match="needs a unit"):
        parse(str(least - 1), "--option")


def test_zero_bytes_need_no_unit() -> None:
    assert parse_size("0", "--kv-memory") == 0


@given(st.integers(1, 10**12))
def test_a_number_known_to_be_in_the_base_unit_is_taken_as_it_is(number: int) -> None:
    for parse in (parse_size, parse_bandwidth, parse_flops, parse_seconds):
        assert parse(Number(number), "x") == number
