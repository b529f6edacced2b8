"""Stack distances against caches that are simulated block by block, and samples against exact counts."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcalc.traces.reuse import LruStack, NotAPrefixError

Prompt = tuple[tuple[int, ...], int]
"""The names of a prompt's blocks, and its tokens."""


class LruCache:
    """A prefix cache of `size` blocks as an engine runs it: it looks up, makes room, and evicts the tail first."""

    def __init__(self, size: int, block_tokens: int) -> None:
        self.size, self.block_tokens = size, block_tokens
        self.blocks: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.hit_tokens = self.hit_squares = 0

    def serve(self, blocks: tuple[int, ...], usable: int) -> None:
        found = 0
        while found < len(blocks) and blocks[found] in self.blocks:
            found += 1
        tokens = min(found * self.block_tokens, usable)
        self.hit_tokens += tokens
        self.hit_squares += tokens * tokens
        for block in blocks:
            self.blocks.pop(block, None)
        while self.blocks and len(self.blocks) + len(blocks) > self.size:
            self.blocks.popitem(last=False)
        # A prompt that does not fit keeps its start.
        for block in reversed(blocks[: self.size]):
            self.blocks[block] = None


def tree_of_prompts(
    seed: int, requests: int, block_tokens: int, popular: float = 0.6, longest: int = 8
) -> list[Prompt]:
    """Prompts that share prefixes: each starts like an earlier one, or anew. A partial last block has its own name."""
    rng = random.Random(seed)
    names = 0
    prompts: list[tuple[int, ...]] = []
    found = []
    for _ in range(requests):
        start: tuple[int, ...] = ()
        if prompts and rng.random() < popular:
            earlier = rng.choice(prompts[-50:] if rng.random() < 0.7 else prompts)
            start = earlier[: rng.randint(0, len(earlier))]
        count = rng.randint(0 if start else 1, longest)
        blocks = (*start, *range(names, names + count))
        names += count
        prompts.append(blocks)
        found.append((blocks, len(blocks) * block_tokens))
    return found


def stack_of(prompts: list[Prompt], block_tokens: int, most_blocks: int = 10**9) -> LruStack:
    stack = LruStack(block_tokens, most_blocks)
    for blocks, tokens in prompts:
        stack.add(blocks, tokens, tokens - 1)
    return stack


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9), requests=st.integers(1, 120), popular=st.floats(0, 1), longest=st.integers(1, 12),
    block_tokens=st.sampled_from([1, 4, 512]),
)  # fmt: skip
def test_every_size_finds_what_a_simulated_cache_of_that_size_finds(
    seed: int, requests: int, popular: float, longest: int, block_tokens: int
) -> None:
    prompts = tree_of_prompts(seed, requests, block_tokens, popular, longest)
    stack = stack_of(prompts, block_tokens)
    distinct = len({block for blocks, _ in prompts for block in blocks})
    assert stack.distinct_blocks == distinct
    sizes = range(distinct + 2)
    for size, found in zip(sizes, stack.at(sizes)):
        cache = LruCache(size, block_tokens)
        for blocks, tokens in prompts:
            cache.serve(blocks, tokens - 1)
        assert (found.cache_blocks, found.hit_tokens, found.hit_squares) == (size, cache.hit_tokens, cache.hit_squares)
        assert found.low_tokens == found.hit_tokens == found.high_tokens


def best_hits(prompts: list[Prompt], size: int, block_tokens: int, first: int = 0) -> int:
    """Block by block: of the cache and the request, the `size` blocks are kept that are used again the soonest."""
    uses: dict[int, list[int]] = {}
    for now, (blocks, _) in enumerate(prompts):
        for block in blocks:
            uses.setdefault(block, []).append(now)
    depth = {block: place for blocks, _ in prompts for place, block in enumerate(blocks)}
    cache: set[int] = set()
    hits = 0
    for now, (blocks, tokens) in enumerate(prompts):
        found = 0
        while found < len(blocks) and blocks[found] in cache:
            found += 1
        hits += min(found * block_tokens, tokens - 1) if now >= first else 0
        later = {block: [use for use in uses[block] if use > now] for block in cache.union(blocks)}
        wanted = sorted((found[0], depth[block], block) for block, found in later.items() if found)
        cache = {block for _, _, block in wanted[:size]}
    return hits


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**9), requests=st.integers(1, 60), popular=st.floats(0, 1), longest=st.integers(1, 9),
    block_tokens=st.sampled_from([1, 4, 512]), first=st.integers(0, 60),
)  # fmt: skip
def test_the_best_policy_is_the_one_that_knows_the_requests_to_come(
    seed: int, requests: int, popular: float, longest: int, block_tokens: int, first: int
) -> None:
    """After a warm-up, too. No size of LRU finds more."""
    prompts = tree_of_prompts(seed, requests, block_tokens, popular, longest)
    stack = LruStack(block_tokens, optimal=True)
    for number, (blocks, tokens) in enumerate(prompts):
        stack.add(blocks, tokens, tokens - 1, number >= first)
    counted = prompts[first:]
    assert (stack.num_counted, stack.counted_tokens) == (len(counted), sum(tokens for _, tokens in counted))
    assert stack.next_uses is not None
    sizes = range(stack.distinct_blocks + 2)
    for size, lru in zip(sizes, stack.at(sizes)):
        cache = LruCache(size, block_tokens)
        for number, (blocks, tokens) in enumerate(prompts):
            before = cache.hit_tokens
            cache.serve(blocks, tokens - 1)
            if number < first:
                cache.hit_tokens = before
        best = stack.next_uses.hit_tokens(size)
        assert lru.hit_tokens == cache.hit_tokens
        assert lru.hit_tokens <= best == best_hits(prompts, size, block_tokens, first)


def test_the_best_policy_after_many_requests_and_not_of_a_sample() -> None:
    prompts = tree_of_prompts(3, 12_000, 16, popular=0.8, longest=3)
    stack = LruStack(16, optimal=True)
    for blocks, tokens in prompts:
        stack.add(blocks, tokens, tokens - 1)
    assert stack.next_uses is not None  # its slots have been renumbered
    assert [stack.next_uses.hit_tokens(size) for size in (0, 10**6)] == [0, stack.at([10**6])[0].hit_tokens]
    assert stack.next_uses.hit_tokens(300) == best_hits(prompts, 300, 16)
    sample = LruStack(16, 1000, optimal=True)
    for blocks, tokens in prompts:
        sample.add(blocks, tokens, tokens - 1)
    assert sample.next_uses is None


def test_many_requests_are_renumbered_without_a_change() -> None:
    prompts = tree_of_prompts(3, 12_000, 16, popular=0.8, longest=3)
    sizes = (1, 10, 100, 1000)
    found = stack_of(prompts, 16).at(sizes)
    for size, row in zip(sizes, found):
        cache = LruCache(size, 16)
        for blocks, tokens in prompts:
            cache.serve(blocks, tokens - 1)
        assert (row.hit_tokens, row.hit_squares) == (cache.hit_tokens, cache.hit_squares)


def test_a_prompt_in_the_cache_still_computes_its_last_token() -> None:
    stack = LruStack(512)
    for _ in range(3):
        stack.add((7, 8), 1000, 992)  # blocks of 16 tokens: 62 of them end before the last token
    (found,) = stack.at((2,))
    assert (found.hit_tokens, found.hit_squares) == (2 * 992, 2 * 992**2)
    assert stack.at((1,))[0].hit_tokens == 2 * 512


@pytest.mark.parametrize("blocks", [(1, 9), (4, 1), (1, 2, 5), (9, 2)])
def test_names_that_contradict_earlier_prompts_are_refused(blocks: tuple[int, ...]) -> None:
    stack = LruStack(16)
    stack.add((1, 2, 3), 48, 47)
    stack.add((9, 5), 32, 31)
    before = stack.at((1, 2, 3, 4, 5))
    with pytest.raises(NotAPrefixError):
        stack.add(blocks, 16 * len(blocks), 16 * len(blocks) - 1)
    assert stack.at((1, 2, 3, 4, 5)) == before
    stack.add((1, 2, 3), 48, 47)
    assert stack.at((5,))[0].hit_tokens == 47


@pytest.mark.parametrize("seed", range(8))
def test_a_sample_is_within_its_stated_error(seed: int) -> None:
    prompts = tree_of_prompts(seed, 6_000, 16, popular=0.7, longest=10)
    exact, sampled = stack_of(prompts, 16), stack_of(prompts, 16, most_blocks=4_000)
    assert sampled.sampling_rate in (1 / 4, 1 / 8)
    sizes = [2**power for power in range(4, 15)]
    for truth, found in zip(exact.at(sizes), sampled.at(sizes)):
        assert found.low_tokens <= truth.hit_tokens <= found.high_tokens, truth.cache_blocks
        # The range says something: from a quarter of the kept blocks on, its ends are within 7 % of all tokens.
        if truth.cache_blocks >= 1024:
            assert found.high_tokens - found.low_tokens < 0.14 * exact.num_tokens
            # So are the squares that a found token stands for: where in its prompt it is.
            squares = truth.hit_squares / truth.hit_tokens
            assert found.hit_squares / found.hit_tokens == pytest.approx(squares, rel=0.07)
    assert abs(sampled.distinct_blocks / exact.distinct_blocks - 1) < 0.1
    # A cache without a limit finds what the largest distance finds.
    (truth,), (found,) = (counts.at([1 << 40]) for counts in (exact, sampled))
    assert found.low_tokens <= truth.hit_tokens <= found.high_tokens
    assert found.hit_tokens == pytest.approx(truth.hit_tokens, rel=0.1)


def test_the_numbers_of_a_sample_are_bounded() -> None:
    stack = stack_of(tree_of_prompts(1, 20_000, 16), 16, most_blocks=1_000)
    assert len(stack._owner) <= 1_000
    assert len(stack._weights) <= 8_192


# The tokens of 46,251 that the KVCacheManager of vLLM 0.33.0 found (v1/core/kv_cache_manager.py), run on a CPU with
# these prompts one after the other, by the number of its blocks of 16 tokens.
_VLLM_FOUND = {40: 12928, 60: 17488, 100: 21792, 200: 23504, 400: 24320, 2000: 24736}


def test_vllms_own_cache_finds_the_same() -> None:
    """A small cache of vLLM finds less: a block that is not full, and the one of the last token, take memory too."""
    draw, fresh, prompts = random.Random(3), 100_000, list[list[int]]()
    documents = [[place * 1000 + block for block in range(12)] for place in range(6)]
    stack = LruStack(16, 10**6)
    for _ in range(400):
        names = [*draw.choice([*documents, *prompts[-20:]])]
        names = names[: draw.randrange(len(names) + 1)]
        new = draw.randrange(1, 6)
        names = [*names, *range(fresh, fresh + new)][:30]
        fresh += new
        prompts.append(names)
        tokens = len(names) * 16 + draw.choice([0, 0, 3, 15])
        stack.add(names, tokens, (tokens - 1) // 16 * 16)
    assert stack.num_tokens == 46_251
    found = dict(zip(_VLLM_FOUND, (each.hit_tokens for each in stack.at([*_VLLM_FOUND]))))
    assert {size: found[size] for size in (200, 400, 2000)} == {size: _VLLM_FOUND[size] for size in (200, 400, 2000)}
    for size in (40, 60, 100):
        assert 1 <= found[size] / _VLLM_FOUND[size] < 1.012
