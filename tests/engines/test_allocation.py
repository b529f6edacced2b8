"""What an engine allocates if requests draft nothing and have nothing in common is what the engine counts."""

from __future__ import annotations

import inspect

import pytest

from kvcalc.engines import ENGINES, load_engine
from kvcalc.engines.allocation import Allocation, Drafts, Requests
from kvcalc.engines.engine import Engine
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import all_caches

BF16 = DTYPES["bf16"]
# Facts about an engine's own account, which no request changes. They are asked of `Allocation.engine`.
FACTS = {
    "at", "attended", "auto_context", "block_tokens", "check_auto_context", "check_context", "check_encoder",
    "check_ranks", "check_start", "context_defaults", "cut", "default_block", "device_defaults", "device_settings",
    "divide_cache", "divide_rows", "divides_tokens", "eager_launches", "entries", "entry_sizes", "kept",
    "known_releases", "kv_dtype",
    "loaded_tables", "lookahead_tokens", "needed_context", "pool_limit", "prompt_division", "prompt_ranks_in",
    "prompt_settings", "replica_settings", "reserve", "reuse", "role_in", "rules_used", "split_layers", "stage_bounds",
    "weight_dtype", "device_stages", "disaggregation", "draft_tables", "schedule", "weight_padding",
    "with_default_block", "limit_running", "context_limits",
}  # fmt: skip


def methods_of(kind: type) -> dict[str, object]:
    found = vars(kind).items()
    return {
        name: value
        for name, value in found
        if not name.startswith("_")
        and not isinstance(value, property)
        and (callable(value) or isinstance(value, (staticmethod, classmethod)))
    }


def test_an_allocation_answers_everything_that_depends_on_the_requests() -> None:
    engine, allocation = methods_of(Engine), methods_of(Allocation)
    assert set(engine) - set(allocation) == FACTS
    assert set(allocation) - set(engine) == {"alone", "of"}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_plain_requests_change_nothing(name: str, model: str) -> None:
    """Neither do requests with a prefix of no tokens, or drafts without slots."""
    spec = load_model(model)
    engine = load_engine(name, spec)
    for requests in (Requests(), Requests(0, 0, None)):
        allocation = Allocation(engine, requests)
        assert allocation.alone() is allocation
        for tokens, batch in ((1, 1), (100, 7), (9000, 3)):
            for method in ("held_bytes", "batch_bytes", "all_stages_bytes", "replica_bytes", "host_bytes", "pool"):
                asked = (spec, BF16, tokens, batch)
                assert getattr(allocation, method)(*asked) == getattr(engine, method)(*asked), method
            for method in ("growth", "lines", "start_bytes", "batch_line"):
                assert getattr(allocation, method)(spec, BF16, tokens) == getattr(engine, method)(spec, BF16, tokens)
            blocks = engine.blocks(spec, BF16, tokens, batch, 10**10)
            assert allocation.blocks(spec, BF16, tokens, batch, 10**10) == blocks
        assert allocation.growth_tokens(spec, BF16) == engine.growth_tokens(spec, BF16)
        assert allocation.longest_context(spec, BF16, 2, 10**9) == engine.longest_context(spec, BF16, 2, 10**9)


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm"])
def test_slots_are_tokens_at_the_end_of_every_request(name: str) -> None:
    spec = load_model("gpt-oss-20b")
    engine = load_engine(name, spec)
    drafting = Allocation(engine, Requests(slots=5))
    for tokens, batch in ((100, 1), (4095, 3), (9000, 2)):
        assert drafting.batch_bytes(spec, BF16, tokens, batch) == engine.batch_bytes(spec, BF16, tokens + 5, batch)
        lines = drafting.pool(spec, BF16, tokens, batch) or drafting.lines(spec, BF16, tokens) or []
        held = drafting.held_bytes(spec, BF16, tokens, batch if drafting.pool(spec, BF16, tokens, batch) else 1)
        assert sum(line.bytes for line in lines) == held
        growth = drafting.growth(spec, BF16, tokens)
        assert growth.bytes_per_token == engine.growth(spec, BF16, tokens + 5).bytes_per_token
        assert growth.fixed_bytes + growth.bytes_per_token * tokens == drafting.replica_bytes(spec, BF16, tokens)
    # Memory for `n` tokens holds five tokens less of a context.
    memory = engine.batch_bytes(spec, BF16, 9000, 2)
    longest, drafted = (one.longest_context(spec, BF16, 2, memory) for one in (engine, drafting))
    assert longest is not None
    assert drafted == longest - 5
    for cache in all_caches(spec):
        assert drafting.cache_bytes(cache, 4095, BF16) == engine.cache_bytes(cache, 4100, BF16)
    for room in (None, 10**10):
        asked = spec, BF16, room
        assert drafting.max_running_requests(*asked, 4095) == engine.max_running_requests(*asked, 4100)
    assert drafting.most_running(spec, BF16, 10**10, 900, 4095) == engine.most_running(spec, BF16, 10**10, 905, 4100)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_drafter_with_as_many_layers_takes_half_of_the_memory(name: str) -> None:
    """Its pool has as many tokens as the model's, at every length and for every number of requests."""
    spec = load_model("llama-3-8b")
    engine, groups = load_engine(name, spec), spec.layers
    moved = tuple(group._replace(first=group.first + 32, last=group.last + 32) for group in groups)
    both = spec._replace(layers=(*groups, *moved), first_draft_layer=32)
    drafting = Allocation(engine, Requests(slots=5, drafts=Drafts(engine, spec)))
    memory = 10**10 + 1
    for tokens, batch in ((4095, 1), (9000, 3)):
        plain = engine.held_bytes(spec, BF16, tokens + 5, batch)
        assert drafting.held_bytes(both, BF16, tokens, batch) == 2 * plain
        blocks = engine.blocks(spec, BF16, tokens, batch, memory // 2)
        own, drafted = blocks.describe(), drafting.blocks(both, BF16, tokens, batch, memory).describe()
        assert drafted == {**own, "request_bytes": 2 * engine.held_bytes(spec, BF16, tokens + 5, 1)}
        running = engine.most_running(spec, BF16, memory // 2, 905, tokens + 5)
        assert drafting.most_running(both, BF16, memory, 900, tokens) == running
        pool = engine.running_pool(spec, BF16, tokens, batch, memory // 2)
        assert drafting.running_pool(both, BF16, tokens, batch, memory) == pool
    # Layers that draft nothing leave all of it to the model.
    assert drafting.running_pool(spec, BF16, 99, 1, memory) == engine.running_pool(spec, BF16, 99, 1, memory)


def test_each_pool_is_counted_by_its_own_engine() -> None:
    """Blocks of 16 tokens for the model and of 64 for its drafter: 4,100 tokens are 257 blocks and 65 blocks."""
    spec = load_model("llama-3-8b")
    engine, other = load_engine("vllm", spec), load_engine("vllm", spec, {"block-size": "64"})
    moved = tuple(group._replace(first=group.first + 32, last=group.last + 32) for group in spec.layers)
    both = spec._replace(layers=(*spec.layers, *moved), first_draft_layer=32)
    drafting = Allocation(engine, Requests(slots=5, drafts=Drafts(other, spec)))
    row = 32 * 2 * 8 * 128 * 2
    needed = (257 * 16 + 65 * 64) * row
    for method in ("held_bytes", "batch_bytes", "all_stages_bytes", "replica_bytes"):
        assert getattr(drafting, method)(both, BF16, 4095, 3) == 3 * needed, method
    assert drafting.growth_tokens(both, BF16) == 64
    growth = drafting.growth(both, BF16, 4095)
    assert growth.bytes_per_token == 2 * row
    assert growth.fixed_bytes == needed - 4095 * 2 * row
    # The drafter's blocks take a little more than half.
    assert drafting._of_own(both, BF16, 4100, 1, needed) == 257 * 16 * row
    lines = drafting.lines(both, BF16, 4095)
    assert lines is not None
    assert sum(line.bytes for line in lines) == needed


def test_every_method_names_its_arguments_like_the_engine() -> None:
    """But for what the allocation knows itself: the tokens that requests keep once."""
    engine, allocation = methods_of(Engine), methods_of(Allocation)
    for name in set(engine) & set(allocation):
        own = list(inspect.signature(getattr(Engine, name)).parameters)
        assert [one for one in own if one != "shared_tokens"] == list(
            inspect.signature(getattr(Allocation, name)).parameters
        ), name


@pytest.mark.parametrize(("name", "block"), [("vllm", 16), ("tensorrt-llm", 32)])
def test_a_common_prefix_is_kept_once_in_whole_blocks(name: str, block: int) -> None:
    """At least the last token of a prompt is computed, so its block is each request's own."""
    spec, row = load_model("llama-3-8b"), 32 * 2 * 8 * 128 * 2
    engine = load_engine(name, spec)
    sharing = Allocation(engine, Requests(prefix_tokens=1024))
    for tokens, shared in ((4095, 1024), (1025, 1024), (1024, 1024 - block), (500, 499 // block * block), (1, 0)):
        needed = -(-tokens // block) * block
        for batch in (1, 3):
            asked, held = (spec, BF16, tokens, batch), (shared + batch * (needed - shared)) * row
            for method in ("held_bytes", "batch_bytes", "all_stages_bytes", "replica_bytes"):
                assert getattr(sharing, method)(*asked) == held, method
            assert sharing.alone().batch_bytes(*asked) == engine.batch_bytes(*asked) == batch * needed * row
            lines, alone = sharing.pool(*asked), sharing.alone().pool(*asked)
            if batch == 1 or not shared:
                assert lines == alone
                continue
            assert lines is not None
            assert lines[-1] == ("prefix kept once", -(batch - 1) * shared * row)
            assert sum(line.bytes for line in lines) == held
        most = sharing.max_running_requests(spec, BF16, 10**10, tokens)
        assert most == engine.max_running_requests(spec, BF16, 10**10, tokens, shared)
    assert sharing.batch_line(spec, BF16, 4095) is None
    figures = sharing.blocks(spec, BF16, 4095, 3, 10**10).describe()
    assert figures == engine.blocks(spec, BF16, 4095, 3, 10**10).describe()
    # A token more is each request's own, but for those of the prefix.
    assert sharing.growth(spec, BF16, 4095).bytes_per_token == engine.growth(spec, BF16, 4095).bytes_per_token == row
    memory = sharing.batch_bytes(spec, BF16, 9600, 3)
    assert sharing.longest_context(spec, BF16, 3, memory) == 9600
