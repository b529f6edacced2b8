"""TensorRT-LLM's hybrids, computed by hand from the shapes of its tensors."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.drafting import Speculation
from kvcalc.model.layout import Layout
from tests.documents import estimate, texts
from tests.engines.models import ask, gated_delta, lines, total

# 30 layers of 8,192 channels x 3 inputs in bf16, and 32 heads of 128 x 128; 10 layers of 2 heads of 256, K and V.
INPUTS, ELEMENTS, TOKEN = 30 * 8192 * 3 * 2, 30 * 32 * 128 * 128, 10 * 2 * 2 * 256 * 2


OLD, POOLS = "tensorrt-llm@1.2", "tensorrt-llm@1.3.0rc24"  # without and with KVCacheManagerV2
PAGE = 2 * 2**20


def nano(**asked: Any) -> dict[str, Any]:
    return estimate(kvcalc.load_model("nemotron-3-nano-30b-a3b"), **{"engine": OLD, **asked})


def test_a_request_has_blocks_and_a_state() -> None:
    config = gated_delta(mamba_ssm_dtype="float32")
    assert total(config, OLD, 100, 3) == 3 * (128 * TOKEN + INPUTS + 4 * ELEMENTS)
    # Without a type for them, the states have the model's.
    config = {**gated_delta(), "mamba_ssm_dtype": None}
    assert total(config, OLD, 100, 3) == 3 * (128 * TOKEN + INPUTS + 2 * ELEMENTS)


def test_states_are_allocated_for_the_largest_batch() -> None:
    settings = {"max-batch-size": "64"}
    found = ask(gated_delta(mamba_ssm_dtype="float32"), OLD, 100, 3, settings=settings)
    state = INPUTS + 4 * ELEMENTS
    assert found["kv_cache"]["total_bytes"] == 3 * 128 * TOKEN + 64 * state
    named = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
    assert named["states beyond the batch"] == 61 * state
    assert sum(named.values()) == found["kv_cache"]["total_bytes"]
    one = {line["name"]: line["bytes"] for line in found["engine"]["request_lines"]}
    assert sum(one.values()) == found["engine"]["request_bytes"] == 128 * TOKEN + 64 * state


def test_the_blocks_take_the_memory_that_the_states_leave() -> None:
    state = INPUTS + 4 * ELEMENTS
    memory = 2 * state + 40 * 32 * TOKEN
    found = ask(gated_delta(mamba_ssm_dtype="float32"), OLD, 100, 2, kv_memory_bytes=memory)
    assert (found["engine"]["num_gpu_blocks"], found["engine"]["max_concurrency"]) == (40, 10)
    assert found["fit"]["max_batch_size"] == memory // (4 * 32 * TOKEN + state)


def test_nemotrons_layers_without_a_cache_take_nothing() -> None:
    """Nemotron-3-Nano: 23 Mamba-2 layers, 6 of attention, and 23 MLPs; its config names fp32 states."""
    found = nano(context_tokens=1000, batch_size=2)
    state = 23 * ((64 * 64 + 2 * 8 * 128) * 3 * 2 + 64 * 64 * 128 * 4)
    assert found["kv_cache"]["total_bytes"] == 2 * (1024 * 6 * 2 * 2 * 128 * 2 + state)
    assert any("block reuse" in text for text in texts(found))
    for size in (2, 4):
        part = nano(context_tokens=1000, batch_size=2, tensor_parallel_size=size)["kv_cache"]["bytes_per_device"]
        assert part == 2 * (1024 * 6 * 2 * max(1, 2 // size) * 128 * 2 + state // size)


def test_stages_hold_their_own_layers() -> None:
    one = nano(context_tokens=1000, batch_size=2)["kv_cache"]
    four = nano(context_tokens=1000, batch_size=2, pipeline_parallel_size=4)
    assert four["kv_cache"]["devices_total_bytes"] == one["total_bytes"]
    assert sum(line["bytes"] for line in four["engine"]["pool_lines"]) == four["kv_cache"]["bytes_per_device"]


def test_what_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not divide the 8 groups"):
        nano(context_tokens=1000, tensor_parallel_size=16)
    with pytest.raises(UsageError, match="the states of drafts are not modelled"):
        nano(context_tokens=1000, speculative=Speculation("ngram", 3))
    for name in ("falcon-h1-tiny-90m", "kimi-linear-48b", "mamba-2.8b", "jamba-v0.1"):
        with pytest.raises(ModelError, match="TensorRT-LLM"):
            estimate(kvcalc.load_model(name), engine="tensorrt-llm")


def test_the_lines_of_a_request_add_up() -> None:
    for tokens in (1, 31, 5000):
        found = lines(gated_delta(), OLD, tokens)
        assert set(found) <= {"stored", "different layout or dtype", "blocks rounded up"}


def test_newer_releases_have_pools_of_blocks_and_of_states() -> None:
    """3 requests and a dummy have 4 states: 120 pages of 2 MiB and, for the inputs of the convolutions, 3 more.

    The pools have the proportion for requests of 64 tokens, half of 4 blocks: 6 blocks are 2 pages. 12 blocks need
    twice as many, and so the pools take twice 125 pages.
    """
    found = ask(gated_delta(mamba_ssm_dtype="float32"), POOLS, 100, 3)
    assert found["kv_cache"]["total_bytes"] == 250 * PAGE
    named = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
    assert named["dummy state"] == INPUTS + 4 * ELEMENTS
    assert named["blocks rounded up"] == 3 * 28 * TOKEN
    assert sum(named.values()) == 250 * PAGE
    assert named["pools in a fixed proportion"] == 250 * PAGE - 4 * named["dummy state"] - 12 * 32 * TOKEN
    assert any("periodic_snapshot_interval" in text for text in texts(found))


def test_a_request_of_one_block_has_one() -> None:
    """Three of them take a page less than six. The pools have the proportion for requests of one block."""
    assert total(gated_delta(mamba_ssm_dtype="float32"), POOLS, 32, 3) == 124 * PAGE


def test_the_states_of_all_that_may_run_come_first() -> None:
    """65 states take 1,950 + 46 pages. With a long average, the blocks have the rest of the memory."""
    settings = {"max-batch-size": "64", "avg-seq-len": "30000"}
    memory = 4096 * PAGE
    found = ask(gated_delta(mamba_ssm_dtype="float32"), POOLS, 32768, 2, settings=settings, kv_memory_bytes=memory)[
        "engine"
    ]
    # 8 GiB are in pages of 16 MiB: 65 states take 244 + 6 of them, and the blocks 262.
    assert found["num_gpu_blocks"] == 262 * 16 * 2**20 // (32 * TOKEN)
    assert found["max_concurrency"] == found["num_gpu_blocks"] / 1024


def test_two_stages_have_states_for_the_requests_of_both() -> None:
    asked: dict[str, Any] = {"context_tokens": 1000, "batch_size": 2, "engine": POOLS}
    found = nano(**asked, pipeline_parallel_size=2, engine_settings={"max-batch-size": "4"})
    named = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
    assert named["states beyond the batch"] == 6 * named["dummy state"]
    assert sum(named.values()) == found["kv_cache"]["bytes_per_device"]


@pytest.mark.parametrize(("groups", "refused"), [(1, ()), (2, (4, 8)), (4, (8,)), (6, (4, 8))])
def test_several_groups_of_a_state_are_divided_and_one_is_on_every_device(
    groups: int, refused: tuple[int, ...]
) -> None:
    spec = kvcalc.load_model("nemotron-3-nano-30b-a3b")
    cut = tuple(
        group._replace(
            caches=tuple(
                cache._replace(num_groups=groups) if isinstance(cache, RecurrentState) else cache
                for cache in group.caches
            )
        )
        for group in spec.layers
    )
    rules = load_engine(OLD, spec)
    for ranks in (1, 2, 4, 8):
        if ranks in refused:
            with pytest.raises(LayoutError, match=f"does not divide the {groups} groups"):
                rules.check_ranks(spec._replace(layers=cut), Layout(ranks))
        else:
            rules.check_ranks(spec._replace(layers=cut), Layout(ranks))
