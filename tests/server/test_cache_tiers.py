"""The arithmetic of tiers, against counting one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.errors import UsageError
from kvcalc.question.question import CacheReuse
from kvcalc.server import reuse as tiers


@given(st.integers(-5, 4000), st.integers(1, 90), st.integers(1, 40), st.integers(1, 9))
def test_tokens_kept_are_those_of_a_count_one_by_one(memory: int, tokens: int, row: int, step: int) -> None:
    tokens *= step

    def bytes_of(count: int) -> int:
        return 7 + row * count if count else 0

    left, contexts = memory, 0
    while left >= bytes_of(tokens):
        left, contexts = left - bytes_of(tokens), contexts + 1
    part = max((count for count in range(0, tokens + 1, step) if bytes_of(count) <= left), default=0)
    assert tiers.contexts_kept(memory, bytes_of(tokens)) == contexts
    assert tiers.longest_kept(left, bytes_of, tokens, step) == part
    assert tiers.tokens_kept(memory, bytes_of, tokens, step) == contexts * tokens + part


def test_a_context_of_no_bytes_has_no_limit() -> None:
    assert tiers.contexts_kept(100, 0) is None
    assert tiers.tokens_kept(100, lambda _: 0, 8, 1) is None


# Whole microseconds: at a tie, sums of floats are on either side of each other at random.
@given(
    st.integers(0, 2_000_000), st.integers(1_000, 2_000_000), st.integers(0, 50_000_000),
    st.integers(1_000, 2_000_000), st.integers(0, 10_000), st.integers(1, 16),
)  # fmt: skip
def test_the_break_even_length_is_the_first_from_which_all_pay(
    wait: int, per_token: int, floor: int, compute: int, square: int, step: int
) -> None:
    most = 640

    def move(count: int) -> int:
        return wait + per_token * count

    def again(count: int) -> int:
        return max(0, compute * count + square * count * count - floor)

    lengths = range(step, most // step * step + 1, step)
    failing = [count for count in lengths if move(count) > again(count)]
    first = next((count for count in lengths if not failing or count > failing[-1]), None)
    found = tiers.break_even_tokens(move, again, step, most)
    # The search takes lengths from one that pays on to pay. With a straight and a bent line that is so.
    assert found == first


def test_a_length_that_pays_between_others_is_not_the_answer() -> None:
    pays = {1, 2, 3, 40, 41, 42, 43, 44, 45, 46, 47, 48}
    assert tiers.break_even_tokens(lambda n: 0.0 if n in pays else 2.0, lambda _: 1.0, 1, 48) == 40
    assert tiers.break_even_tokens(lambda n: 0.0 if n in pays else 2.0, lambda _: 1.0, 1, 30) is None
    # A context of 16 tokens has one whole unit of 16, and one of 8 has none.
    assert tiers.break_even_tokens(lambda n: 0.0, lambda _: 1.0, 16, 16) == 16
    assert tiers.break_even_tokens(lambda n: 0.0, lambda _: 1.0, 16, 8) is None


CPU = (("cpu", 1 << 30),)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, None), ({"prefix_tokens": -1}, "prefix_tokens"), ({"turns": 1}, "turns"), ({"turns": 2}, None),
        ({"turns": 1000}, None), ({"turns": 1001}, "--turns 1001: must be at most 1,000"),
        ({"offload": CPU}, None),
        ({"offload": (("tape", 5),)}, "--offload 'tape': not a tier"), ({"offload": (("cpu", 0),)}, "--offload"),
        ({"offload": CPU, "bandwidths": CPU}, None), ({"offload": CPU, "bandwidths": (("cpu", 0),)}, "bandwidth"),
        ({"offload": CPU, "bandwidths": (("disk", 5),)}, "--offload-bandwidth disk: --offload has no such tier"),
    ],
)  # fmt: skip
def test_what_is_asked_of_a_cache_that_is_used_again(asked: dict[str, Any], said: str | None) -> None:
    if said is None:
        tiers.check_reuse(CacheReuse(**asked), has_device=False)
        return
    with pytest.raises(UsageError) as raised:
        tiers.check_reuse(CacheReuse(**asked), has_device=True)
    assert said in raised.value.message


def test_a_cache_is_sent_from_a_device() -> None:
    sent = CacheReuse(transfer="infiniband-400g")
    tiers.check_reuse(sent, has_device=True)
    with pytest.raises(UsageError, match="needs a device"):
        tiers.check_reuse(sent, has_device=False)
