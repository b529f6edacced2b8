"""How KVCacheManagerV2 divides memory, against counting block by block and trying one page after another."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from random import Random
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.tensorrt_llm.engine import cache_buffers
from kvcalc.engines.tensorrt_llm.pools import (
    STATE,
    Division,
    Group,
    Sequences,
    blocks_of,
    least_slots,
    most_blocks,
    page_bytes,
)
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.caches import FullAttention
from tests.engines.models import ask, gated_delta, plain, sparse
from tests.engines.shapes import gemma4, minimax_m3, t5

MIB = 2**20
TYPICAL = (Sequences(1500, 0, 5), Sequences(0, 0, 1))


def blocks_with(first: int, end: int, block: int) -> int:
    """The blocks that hold one of the tokens from `first` to `end`."""
    return len({token // block for token in range(max(0, first), end)})


def slots_of(group: Group, batch: Sequence[Sequences], block: int) -> int:
    """The slots of a group for a batch without a history: a state, or the blocks of each request."""
    return sum(
        one.number * (1 if window == STATE else blocks_with(1 - (window or 1 << 20), one.capacity, block))
        for window in group.windows
        for one in batch
    )


def most_of(window: int, block: int) -> int:
    """The most blocks that a running request has in its window."""
    return max(blocks_with(length - window, length, block) for length in range(1, 2 * window + block + 1))


def test_a_window_keeps_the_blocks_with_one_of_its_tokens() -> None:
    """The next token reads the window before it, and tokens beyond the history are new."""
    random = Random(1)
    for _ in range(300):
        block, window = random.choice((1, 2, 16, 32)), random.randint(1, 100)
        history = random.randint(0, 150)
        capacity = history + random.randint(1, 50)
        of = Sequences(capacity, history)
        assert blocks_of(None, of, block) == blocks_with(0, capacity, block)
        assert blocks_of(window, of, block) == blocks_with(history + 1 - window, capacity, block)
        assert blocks_of(STATE, of, block) == most_blocks(STATE, capacity, block) == 1
        assert most_blocks(window, 2 * window + block, block) == most_of(window, block)
        assert most_blocks(None, capacity, block) == blocks_with(0, capacity, block)


def test_a_group_has_at_least_what_each_batch_takes_and_room_to_grow() -> None:
    """A request starts if its pools are at most 95 % full (max_util_for_resume). A state does not grow."""
    random = Random(2)
    for _ in range(100):
        block = random.choice((16, 32))
        windows: list[tuple[int | None, ...]] = [(None,), (STATE,), (random.randint(1, 99),), (None, 64)]
        groups = [Group((MIB,), each) for each in random.sample(windows, 2)]
        batches = [
            [Sequences(random.randint(1, 5000), 0, random.randint(1, 9)), Sequences(1, 0, random.randint(1, 99))]
            for _ in range(random.randint(1, 3))
        ]
        for group, alone, least in zip(groups, least_slots(groups, block), least_slots(groups, block, batches)):
            each = [1 if window == STATE else most_of(window, block) for window in group.windows if window is not None]
            largest = max((most_of(window, block) for one in groups for window in one.windows if window), default=1)
            assert alone == sum(each) + group.windows.count(None) * largest
            full = Fraction(1) if STATE in group.windows else Fraction(95, 100)
            assert least == max(alone, *(ceil(slots_of(group, batch, block) / full) for batch in batches))


def random_division(random: Random) -> Division:
    sizes = [(MIB // 2,), (3 * MIB, MIB), (100_000,), (MIB, MIB // 3)]
    windows: list[tuple[int | None, ...]] = [(None,), (STATE,), (512,), (64,)]
    groups = [Group(size, window) for size, window in zip(random.sample(sizes, 3), random.sample(windows, 3))]
    return Division(groups[: random.randint(1, 3)], 32, TYPICAL)


@pytest.mark.parametrize("seed", range(10))
def test_pools_share_all_pages_in_the_proportion_of_the_typical_batch(seed: int) -> None:
    random = Random(seed)
    division = random_division(random)
    quota = random.randint(100, 900) * MIB
    slots, page = division.slots(quota), page_bytes(quota)
    pages = [sum(-(-n * size // page) for size in group.slot_bytes) for n, group in zip(slots, division.groups)]
    total = division.rounded(quota) // page
    assert sum(pages) <= total
    assert all(has >= least for has, least in zip(slots, division.floors))
    if all(has > least + 1 for has, least in zip(slots, division.floors)):
        weights = [
            sum(-(-slots_of(group, TYPICAL, 32) * size // page) for size in group.slot_bytes)
            for group in division.groups
        ]
        for has, weight, group in zip(pages, weights, division.groups):
            slack = 2 + sum(group.slot_bytes) / page
            assert abs(has - Fraction(total * weight, sum(weights))) <= slack


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_memory_is_what_trying_every_page_finds(seed: int) -> None:
    random = Random(seed)
    division = random_division(random)
    needed = [random.randint(1, 60) for _ in division.groups]
    pages = 1
    while not all(has >= needs for has, needs in zip(division.slots(pages * 2 * MIB), needed)):
        pages += 1
    assert division.smallest(needed) == division.rounded(pages * 2 * MIB)


@pytest.mark.parametrize("seed", range(10))
def test_within_a_typical_batch_the_other_pools_are_as_large_as_for_it(seed: int) -> None:
    """The first group of a hybrid may be smaller than a typical batch, and the states are those of that batch."""
    random, division = Random(seed), random_division(Random(seed))
    first, *others = division.groups
    page, typical = 2 * MIB, slots_of(first, TYPICAL, 32)
    slots = [random.randint(1, typical), *(slots_of(group, TYPICAL, 32) for group in others)]
    pages = [sum(-(-n * size // page) for size in group.slot_bytes) for n, group in zip(slots, division.groups)]
    found = division.multiple([slots[0], *(1 for _ in others)], typical)
    assert found // page >= sum(pages)


def pools_of(config: dict[str, object], engine: str, tokens: int, memory: int | None, **settings: str) -> list[int]:
    """The blocks of each pool."""
    given = {name.replace("_", "-"): text for name, text in settings.items()}
    found = ask(config, engine, tokens, settings=given, kv_memory_bytes=memory)["engine"]
    return [pool["num_gpu_blocks"] for pool in found["window_pools"]]


@pytest.mark.parametrize(("window", "tokens", "pages"), [(520, 5044, (6, 21)), (521, 5045, (7, 22))])
def test_with_an_average_the_longest_request_always_fits_beside_all_others(
    window: int, tokens: int, pages: tuple[int, int]
) -> None:
    """63 other requests have a token each, at 95 %: of 583 and 584 tokens in windows, 614 slots are 6 pages and 615 are
    7; of 5,107 and 5,108 tokens elsewhere, 5,376 slots are 21 pages and 5,377 are 22. In 1 MiB the pools have no more.
    """
    found = pools_of(
        gemma4(), "tensorrt-llm", tokens, MIB, tokens_per_block="1", avg_seq_len="1", max_batch_size="64",
        max_num_tokens="64", max_attention_window=",".join([str(window)] * 5 + ["131072"]),
    )  # fmt: skip
    # A token has 10 x 2,048 bytes in windows and 2 x 4,096 in the other layers.
    assert found == [2 * MIB * pages[0] // (10 * 2048), 2 * MIB * pages[1] // (2 * 4096)]


@pytest.mark.parametrize(
    ("tokens", "step", "pages"),
    [(32768, "8192", 90), (64, "32768", 85)],  # 1,024 + 63 blocks of 655,360 bytes at 95 %, and 1,024 of a step
)
def test_the_blocks_of_a_hybrid_hold_its_longest_request_and_a_step(tokens: int, step: str, pages: int) -> None:
    found = ask(
        gated_delta(), "tensorrt-llm@1.3.0rc24", tokens, kv_memory_bytes=5 << 30,
        settings={"avg-seq-len": "32", "max-batch-size": "64", "max-num-tokens": step},
    )["engine"]  # fmt: skip
    assert found["num_gpu_blocks"] == pages * 8 * MIB // 655_360


def test_max_tokens_decides_unless_a_share_of_the_memory_is_given_too() -> None:
    """As with one pool: the smaller of both decides only with a fraction (calculate_max_num_blocks)."""

    def blocks(of: tuple[dict[str, object], str], memory: int | None, **settings: str) -> Any:
        given = {"max-batch-size": "8", **{name.replace("_", "-"): text for name, text in settings.items()}}
        return ask(*of, 4096, kv_memory_bytes=memory, settings=given)["engine"]["num_gpu_blocks"]

    few, many, half = {"max_tokens": "8192"}, {"max_tokens": "9000000"}, {"free_gpu_memory_fraction": "0.5"}
    for of in ((gemma4(), "tensorrt-llm"), (gated_delta(), "tensorrt-llm@1.3.0rc24")):
        assert blocks(of, 4 << 30, **few) == blocks(of, None, **few) == blocks(of, 4 << 30, **few, **half)
        assert blocks(of, 4 << 30, **many) == blocks(of, None, **many) > blocks(of, 4 << 30, **many, **half)
        assert blocks(of, 4 << 30, **many, **half) == blocks(of, 4 << 30, **half) == blocks(of, 2 << 30)


def test_the_tokens_of_a_hybrid_and_its_states_fill_95_percent() -> None:
    """32,768 tokens and 4 states are 467 pages, of which the blocks have 2 in 125: 7 pages."""
    found = ask(gated_delta(), "tensorrt-llm@1.3.0rc24", 100, 3, settings={"max-tokens": "32768"})["engine"]
    assert found["num_gpu_blocks"] == 7 * 2 * MIB // 655_360


def test_without_layers_that_keep_all_tokens_the_smallest_pool_counts() -> None:
    settings = {"max-attention-window": "512,512,512,512,512,64"}
    found = ask(gemma4(), "tensorrt-llm", 4096, settings=settings, kv_memory_bytes=1 << 30)["engine"]
    blocks = [pool["num_gpu_blocks"] for pool in found["window_pools"]]
    assert len(set(blocks)) == 2
    assert found["num_gpu_blocks"] == min(blocks)


def test_an_encoders_output_has_no_pool() -> None:
    for engine in ("tensorrt-llm", "tensorrt-llm@1.2"):
        with pytest.raises(ModelError, match="layout of cross attention is not modelled"):
            ask(t5(), engine, 32)


def test_states_of_requests_without_tokens_need_no_blocks() -> None:
    """In 1 MiB each pool has its least: the blocks one, in a page of 2 MiB, whatever number of states there is."""
    settings = {"max-batch-size": "64"}
    found = ask(gated_delta(), "tensorrt-llm@1.3.0rc24", 64, settings=settings, kv_memory_bytes=MIB)["engine"]
    assert found["num_gpu_blocks"] == 2 * MIB // 655_360


def test_nvfp4_has_a_buffer_for_elements_and_one_for_scales() -> None:
    """Two elements are a byte, and 16 have an fp8 scale: 256 elements of K and of V take 128 and 16 bytes each."""
    rows = [cache_buffers(FullAttention(2, 128, 128), DTYPES[name]) for name in ("nvfp4", "fp8", "bf16")]
    assert rows == [[128, 16] * 2, [256] * 2, [512] * 2]


def test_prefixes_in_pools_of_given_windows_are_refused() -> None:
    spec, given = kvcalc.read_config(plain(), "test", "test"), {"max-attention-window": "128,1024"}
    with pytest.raises(ModelError, match="reused blocks of several windows"):
        load_engine("tensorrt-llm", spec, given).prefixes(spec, DTYPES["bf16"])


def test_an_indexer_belongs_to_a_latent_in_every_layer() -> None:
    assert ask(sparse(), "tensorrt-llm", 32)["kv_cache"]["total_bytes"]
    for dense in (0, 1):
        with pytest.raises(ModelError, match="TensorRT-LLM"):
            ask(minimax_m3(4, dense), "tensorrt-llm", 32)
