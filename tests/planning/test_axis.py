"""Ranges that double, ranges with a step, and lists. Long ranges are never expanded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.engines import ENGINES
from kvcalc.errors import UsageError
from kvcalc.planning.answers.axis import Axis, parse_axis, parse_engines
from kvcalc.units import parse_count, parse_tokens


def tokens(text: str) -> Axis:
    return parse_axis(text, "--context", parse_tokens)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("8192", [8192]), ("1k..8k", [1024, 2048, 4096, 8192]), ("1..10", [1, 2, 4, 8]), ("3..3", [3]),
        ("4k..16k:4k", [4096, 8192, 12288, 16384]), ("1..10:4", [1, 5, 9]), ("8,1..4, 7..8:1", [8, 1, 2, 4, 7, 8]),
    ],
)  # fmt: skip
def test_values(text: str, values: list[int]) -> None:
    axis = tokens(text)
    assert list(axis) == [axis[i] for i in range(len(axis))] == values
    assert (axis.smallest, axis.largest, len(axis)) == (min(values), max(values), len(values))


@pytest.mark.parametrize(
    "text", ["", ",", "..", "1..", "..8", "8..1", "1..8:0", "a..b", "1..2..3", "1..8:", "0..4", "-1"]
)
def test_nonsense_is_refused_with_the_options_name(text: str) -> None:
    with pytest.raises(UsageError, match="--context"):
        tokens(text)


def test_a_long_range_is_not_spelt_out() -> None:
    axis = tokens("1..1000000000000000:1")
    assert len(axis) == 10**15
    assert axis.largest == 10**15
    with pytest.raises(UsageError, match="must be at most"):
        tokens(f"1..{10**60}:1")
    with pytest.raises(UsageError, match="a list of"):
        parse_axis(",".join("1" * 2000), "--batch", parse_count)


@given(count=st.integers(1, 5000), most=st.integers(2, 50))
def test_a_sample_has_both_ends_and_is_bounded(count: int, most: int) -> None:
    sample = Axis([range(1, count + 1)]).sample(most)
    assert sample[0] == 1
    assert sample[-1] == count
    assert len(sample) == min(count, most)
    assert sample == sorted(set(sample))


def test_all_is_every_engine_and_each_stands_once() -> None:
    assert parse_engines(["vLLM", "sglang", "vllm"]) == ("vllm", "sglang")
    assert parse_engines(["llama.cpp", "ALL"]) == ("llama.cpp", *(name for name in ENGINES if name != "llama.cpp"))
