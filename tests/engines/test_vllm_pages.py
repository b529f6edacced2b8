"""vLLM's pages, rule by rule: the pages of a request, the layers that share a table, and how pages get one size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.engines.rounding import ceil_div
from kvcalc.engines.vllm.groups import _approximate_gcd
from kvcalc.engines.vllm.pages import (
    CHUNKED,
    CROSS,
    FULL,
    MLA,
    SLIDING,
    STATE,
    Demand,
    Page,
    need_the_same_tokens,
    unify,
)

LONG = 1 << 40


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([1, 16, 64, 784]))
def test_a_window_holds_its_earlier_tokens_and_those_in_flight_and_may_begin_inside_a_block(
    window: int, in_flight: int, block: int
) -> None:
    page = Page(SLIDING, block, 8, span=window)
    assert page.blocks(Demand(LONG, in_flight)) == ceil_div(window - 1 + in_flight, block) + 1
    # A short sequence is held completely, and takes no more than its length.
    assert page.blocks(Demand(3 * block, in_flight)) <= 3 + 1


def test_a_window_takes_one_block_more_when_its_tokens_no_longer_fill_whole_ones() -> None:
    page = Page(SLIDING, 16, 8, span=17)
    # The 16 previous tokens and 16 tokens in flight take two blocks. One more token needs a third block.
    assert [page.blocks(Demand(LONG, in_flight)) for in_flight in (16, 17)] == [2 + 1, 3 + 1]
    assert page.blocks(Demand(16, 16)) == 1 + 1


def test_a_chunk_holds_all_its_tokens_beside_those_in_flight() -> None:
    page = Page(CHUNKED, 16, 8, span=16)
    assert [page.blocks(Demand(LONG, in_flight)) for in_flight in (16, 17)] == [2, 3]
    assert page.blocks(Demand(20, 16)) == 2


@pytest.mark.parametrize("kind", [FULL, MLA])
def test_attention_to_all_tokens_holds_the_longest_request(kind: str) -> None:
    page = Page(kind, 16, 8)
    assert [page.blocks(Demand(tokens, 16)) for tokens in (1, 16, 17)] == [1, 1, 2]


def test_states_and_encoders_do_not_grow_with_the_request() -> None:
    state, cross = Page(STATE, 0, 0, state_bytes=5), Page(CROSS, 16, 8)
    # One state, unless prefixes are cached or tokens are drafted. No encoder tokens unless the request has some.
    assert (state.blocks(Demand(100, 10)), cross.blocks(Demand(100, 10))) == (1, 0)
    assert state.blocks(Demand(LONG, 10, state_blocks=4)) == 4
    assert [cross.blocks(Demand(LONG, 10, encoder_tokens=tokens)) for tokens in (16, 17)] == [1, 2]


def test_a_page_is_its_tokens_or_its_state_and_padding_replaces_both() -> None:
    assert Page(FULL, 16, 10).bytes == Page(FULL, 16, 10).own_bytes == 160
    assert Page(STATE, 16, 10, state_bytes=7).bytes == 7
    padded = Page(SLIDING, 16, 7, span=5, padded_bytes=480)
    assert (padded.bytes, padded.own_bytes) == (480, 112)
    assert Page(FULL, 16, 10) == Page(FULL, 16, 10, span=0, width=(), state_bytes=0, padded_bytes=0)


FULL_PAGE, MLA_PAGE = Page(FULL, 16, 8), Page(MLA, 16, 576)
WINDOW, CHUNK = Page(SLIDING, 16, 8, span=128), Page(CHUNKED, 16, 8, span=128)
STATE_PAGE, CROSS_PAGE = Page(STATE, 16, 0, state_bytes=640), Page(CROSS, 16, 8)


@pytest.mark.parametrize(
    ("pages", "shared"),
    [
        # All tokens are kept, so the bytes per token may differ.
        ([FULL_PAGE], True),
        ([FULL_PAGE, FULL_PAGE._replace(token_bytes=24)], True),
        ([MLA_PAGE, MLA_PAGE._replace(token_bytes=132)], True),
        ([FULL_PAGE, MLA_PAGE], True),
        # A block table counts blocks, so all blocks must have the same number of tokens.
        ([FULL_PAGE, FULL_PAGE._replace(block_size=32)], False),
        ([WINDOW, WINDOW._replace(block_size=32)], False),
        # Windows are freed together only if they have the same length.
        ([WINDOW, WINDOW._replace(token_bytes=24)], True),
        ([WINDOW, WINDOW._replace(span=64)], False),
        ([CHUNK, CHUNK._replace(token_bytes=24)], True),
        ([CHUNK, CHUNK._replace(span=64)], False),
        # Kinds that keep different tokens never share.
        ([FULL_PAGE, WINDOW], False),
        ([WINDOW, CHUNK], False),
        ([FULL_PAGE, STATE_PAGE], False),
        ([MLA_PAGE, WINDOW], False),
        ([FULL_PAGE, CROSS_PAGE], False),
        # A state is one page, so only its size matters, and whether every rank has the whole.
        ([STATE_PAGE, STATE_PAGE._replace(is_replicated=True)], False),
        ([STATE_PAGE, STATE_PAGE._replace(width=(3, 4))], True),
        ([STATE_PAGE, STATE_PAGE._replace(state_bytes=641)], False),
        ([STATE_PAGE, STATE_PAGE._replace(span=4)], True),
        # For an encoder's output, layers must be identical.
        ([CROSS_PAGE, CROSS_PAGE], True),
        ([CROSS_PAGE, CROSS_PAGE._replace(token_bytes=24)], False),
    ],
)
def test_layers_share_a_table_where_they_keep_the_same_tokens(pages: list[Page], shared: bool) -> None:
    assert need_the_same_tokens(pages) is shared
    assert need_the_same_tokens(pages[::-1]) is shared


LARGE = Page(FULL, 16, 30)


def test_blocks_grow_by_a_whole_factor_to_the_largest_page() -> None:
    for kind in (FULL, MLA, SLIDING, CHUNKED):
        small = Page(kind, 16, 10, span=5)
        for pads in (True, False):
            assert unify([small, LARGE], pads=pads) == [small._replace(block_size=48), LARGE]
    # A page of the largest size does not change, even if there are several of that size.
    assert unify([LARGE, MLA_PAGE._replace(token_bytes=30)]) == [LARGE, MLA_PAGE._replace(token_bytes=30)]
    assert unify([STATE_PAGE, Page(FULL, 16, 40)]) == [STATE_PAGE, Page(FULL, 16, 40)]


def test_pages_of_no_whole_factor_are_padded_where_the_release_pads_and_latents_never() -> None:
    odd = Page(SLIDING, 16, 7, span=5)
    assert unify([odd, LARGE]) == [odd._replace(padded_bytes=480), LARGE]
    assert unify([odd, LARGE], pads=False) is None
    assert unify([odd._replace(kind=MLA), LARGE]) is None
    assert unify([odd._replace(kind=MLA), LARGE], pads=False) is None


@pytest.mark.parametrize("state_bytes", [7, 240])
@pytest.mark.parametrize("pads", [True, False])
def test_states_are_padded_whatever_their_size(state_bytes: int, pads: bool) -> None:
    state = Page(STATE, 16, 0, state_bytes=state_bytes)
    assert unify([state, LARGE], pads=pads) == [state._replace(padded_bytes=480), LARGE]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_unified_pages_have_one_size_and_lose_no_bytes_of_a_token(token_bytes: list[int]) -> None:
    pages = [Page(FULL, 16, width) for width in token_bytes]
    unified = unify(pages)
    assert unified is not None
    assert {page.bytes for page in unified} == {16 * max(token_bytes)}
    assert [page.token_bytes for page in unified] == token_bytes
    assert all(page.own_bytes <= page.bytes for page in unified)


@pytest.mark.parametrize(
    ("counts", "least", "number"),
    [
        ([10, 20, 30], 1, 10), ([9, 18, 27], 2, 9), ([12, 30], 1, 6),
        ([10, 31], 4, 11),  # 11 and 33 are three more, and so are 12 and 32; fewer and larger groups win
        ([7], 9, 9),
    ],
)  # fmt: skip
def test_layers_are_divided_into_the_largest_groups_that_need_the_least_padding(
    counts: list[int], least: int, number: int
) -> None:
    assert _approximate_gcd(counts, least) == number
