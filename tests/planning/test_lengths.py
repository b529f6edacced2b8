"""Lengths of requests from a file: the means, the longest, and the tokens that running requests hold."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UsageError
from kvcalc.question.request_lengths import drawn_lengths, one_length, parse_lengths


def test_like_requests_hold_all_of_themselves() -> None:
    found = parse_lengths("2048,500\n2048,500\n", "x")
    assert (found.input_tokens, found.output_tokens, found.longest_tokens, found.held_tokens) == (2048, 500, 2548, 2548)


def test_means_and_the_longest_and_a_header() -> None:
    found = parse_lengths('prompt,answer\n100,10\n\n "200" , 30 \r\n', "x.csv")
    # A slot runs the second request three quarters of the time: (10 x 110 + 30 x 230) / 40.
    assert found == (150, 20, 230, 230, 230, 200, 2, "x.csv")


def test_lengths_end_at_their_999th_thousandth() -> None:
    """Of 100,000 requests that vary by a third around 2,048 tokens, about 100 are longer."""
    found, random = one_length(2048, 500), Random(7)
    assert (found.reached_tokens, found.held_tokens) == (2548, 2548)
    longer = sum(random.gauss(2048, 2048 / 3) > found.longest_prompt for _ in range(100_000))
    assert 60 < longer < 140
    assert found.longest_tokens == found.longest_prompt + one_length(500, 1).longest_prompt


@pytest.mark.parametrize(
    ("prompt", "answer", "longest"),
    [("fixed:2048", "fixed:500", 2548), ("uniform:100..2000", "fixed:500", 2500), ("fixed:2048", "500", 3063)],
)
def test_distributions_end_where_they_say(prompt: str, answer: str, longest: int) -> None:
    assert drawn_lengths(prompt, answer)[0].longest_tokens == longest


def test_no_request_is_drawn_beyond_the_end_of_its_distribution() -> None:
    found, pairs = drawn_lengths("lognormal:2048,0.33", "lognormal:500,2")
    assert 5200 < found.longest_prompt < 5300  # exp(mean of logs + 3.09 deviations)
    answer = found.longest_tokens - found.longest_prompt
    assert all(tokens <= found.longest_prompt and tokens_out <= answer for tokens, tokens_out in pairs)


def test_lengths_end_at_the_models_limit_if_no_request_surely_exceeds_it() -> None:
    lengths = one_length(100_000, 500)
    assert lengths.within(131_072).longest_tokens == lengths.within(131_072).longest_prompt == 131_072
    assert lengths.within(None) == lengths.within(100_499) == lengths


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no row"), ("prompt,answer\n", "no row"), ("1\n", "row 1"), ("1,2\n3,x\n", "row 2"), ("1,2,3\n", "row 1"),
        ("1,2\n-3,4\n", "row 2"), ("1,0\n", "at least 1"), ("0,1\n", "at least 1"), ("1,2\nprompt,answer\n", "row 2"),
        ("1.5,2\n", "row 1"), (f"{'9' * 13},1\n", "12 digits"), ("\u0661,2\n", "row 1"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as refused:
        parse_lengths(text, "lengths.csv")
    assert refused.value.message.startswith("lengths.csv: ")


@pytest.mark.parametrize(
    "text",
    [
        "arrival_seconds,prompt_tokens,answer_tokens\n0,100,10\n\n0.5,200,30\n",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,100,10\r\n"
        "2023-11-16 18:15:50.9951690,200,30\r\n",
        '{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [0]}\n'
        '{"timestamp": 9, "input_length": 200, "output_length": 30, "hash_ids": [0]}\n',
    ],
    ids=["csv", "azure", "mooncake"],
)
def test_a_trace_has_the_lengths_of_its_requests(text: str) -> None:
    assert parse_lengths(text, "x") == parse_lengths("100,10\n200,30\n", "x")


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("1,2", "line 3: 2 values"),
        ("5,0,1", "line 3: prompt_tokens"),
        ("0.5,9,9", "line 3: arrives"),
        ("5,9,0", "row 3"),
    ],
)
def test_a_bad_row_of_a_trace_is_named(row: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as refused:
        parse_lengths(f"arrival_seconds,prompt_tokens,answer_tokens\n1,2,3\n{row}\n", "chat.csv")
    assert refused.value.message.startswith("chat.csv: ")
    assert refused.value.hint


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**5)), min_size=1, max_size=50))
def test_what_runs_hold_is_between_the_shortest_and_the_longest(rows: list[tuple[int, int]]) -> None:
    found = parse_lengths("\n".join(f"{a},{b}" for a, b in rows), "x")
    totals = [a + b for a, b in rows]
    assert min(totals) <= found.held_tokens <= found.longest_tokens == max(totals)
    assert abs(found.input_tokens - sum(a for a, _ in rows) / len(rows)) <= 0.5
