"""KVCacheManagerV2 of TensorRT-LLM, computed by hand: slots of layers with the same window, in pools of whole pages."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines.tensorrt_llm.pools import STATE, Division, Group, Sequences, least_slots, page_bytes
from kvcalc.errors import LayoutError, ModelError, UsageError
from tests.documents import estimate, texts
from tests.engines.models import ask, gpt_oss, lines, total
from tests.engines.shapes import gemma4

POOLS = "tensorrt-llm@1.3.0rc28"  # the first release that keeps the windows of GPT-OSS in pools of their own
MIB, PAGE = 2**20, 2 * 2**20
# gemma4(): 10 layers with a window of 512 and 2 heads of 256, and 2 layers with 2 heads of 512. A block has 32 tokens.
SLIDING, FULL = 32 * 10 * 2048, 32 * 2 * 4096


def test_windows_have_a_pool_and_the_other_layers_another() -> None:
    """2,049 tokens take 65 blocks, 17 in the window: 9 and 6 pages of 2 MiB, which is the proportion of the pools.

    A prompt of 4,096 tokens takes 128 slots in both pools until it is computed: 40 and 16 pages. 6 in 15 of 99 pages
    are 40.
    """
    assert total(gemma4(), "tensorrt-llm", 4096) == 99 * PAGE
    found = lines(gemma4(), "tensorrt-llm", 4096)
    assert found["in-flight tokens beyond the window"] == 111 * SLIDING
    assert found["pools in a fixed proportion"] == 99 * PAGE - 128 * (SLIDING + FULL)
    # The last four layers read an earlier layer's cache and have one of their own all the same.
    assert found["caches that no layer reads"] == 17 * SLIDING * 3 // 10 + 128 * FULL // 2
    assert found["stored"] == 7 * 512 * 2048 + 4096 * 4096
    # The window is in the middle of a block at both ends.
    assert found["blocks rounded up"] == (17 * 32 - 512) * 7 * 2048
    assert "different layout or dtype" not in found


def test_the_memory_is_divided_in_that_proportion() -> None:
    found = ask(gemma4(), "tensorrt-llm", 4096, kv_memory_bytes=1024 * MIB)["engine"]
    sliding, full = found["window_pools"]
    assert sliding == {
        "window": 512,
        "num_layers": 10,
        "bytes_per_block": SLIDING,
        "num_gpu_blocks": 205 * PAGE // SLIDING,
    }
    assert full == {"window": None, "num_layers": 2, "bytes_per_block": FULL, "num_gpu_blocks": 307 * PAGE // FULL}
    assert (found["num_gpu_blocks"], found["kv_cache_tokens"]) == (2456, 32 * 2456)
    assert found["max_concurrency"] == min(2456 / 128, (656 - 111) / 17)


def test_requests_within_the_window_have_one_pool() -> None:
    found = ask(gemma4(), "tensorrt-llm", 100, 3)
    assert [pool["window"] for pool in found["engine"]["window_pools"]] == [None]
    assert found["kv_cache"]["total_bytes"] == 12 * MIB  # 12 blocks of 917,504 bytes, in whole pages


def test_another_average_length_gives_another_proportion() -> None:
    settings = {"avg-seq-len": "4096", "max-batch-size": "8"}
    asked = {"kv_memory_bytes": 1024 * MIB}
    long = ask(gemma4(), "tensorrt-llm", 4096, settings=settings, **asked)["engine"]["window_pools"]
    usual = ask(gemma4(), "tensorrt-llm", 4096, **asked)["engine"]["window_pools"]
    assert long[1]["num_gpu_blocks"] != usual[1]["num_gpu_blocks"]
    # A prompt of 8,192 tokens, and 7 requests of 4,096 tokens: 256 + 7 x 128 and 256 + 7 x 16 slots of 2 MiB pages.
    pages = (-(-(256 + 7 * 16) * SLIDING // PAGE), -(-(256 + 7 * 128) * FULL // PAGE))
    assert long[0]["num_gpu_blocks"] == round(512 * pages[0] / sum(pages)) * PAGE // SLIDING
    with pytest.raises(UsageError, match="--avg-seq-len 4096 is longer than the context of 1000 tokens"):
        ask(gemma4(), "tensorrt-llm", 1000, settings=settings)


def test_kinds_of_layers_with_slots_of_one_size_share_a_pool() -> None:
    """12 layers of each kind: 786,432 bytes a slot. 32 blocks of all tokens, and 32 of windows while a prompt runs."""
    assert total(gpt_oss(), POOLS, 1024) == 64 * 786_432
    (pool,) = ask(gpt_oss(), POOLS, 1024)["engine"]["window_pools"]
    assert pool["num_layers"] == 24
    # 100 requests: 5 blocks each in the window, and 27 more for one prompt at a time.
    blocks = 100 * (32 + 5) + 27
    assert -(-blocks * 786_432 // PAGE) * PAGE <= total(gpt_oss(), POOLS, 1024, 100) < blocks * 786_432 + 32 * MIB


@pytest.mark.parametrize("model", ["gemma-3-27b", "gpt-oss-120b"])
def test_a_second_prompt_waits_if_both_do_not_fit_in_a_step(model: str) -> None:
    """Two prompts of 4,096 tokens may share a step of 8,192 tokens, and two of 4,097 may not: both loads run."""
    spec = kvcalc.load_model(model)
    asked: dict[str, Any] = {"engine": POOLS, "batch_size": 2, "kv_memory_bytes": 4 << 30}
    short, longer = (estimate(spec, context_tokens=tokens, **asked) for tokens in (4096, 4097))
    assert short["kv_cache"]["total_bytes"] <= longer["kv_cache"]["total_bytes"] <= 4 << 30
    assert (short["fit"]["fits"], longer["fit"]["fits"]) == (True, True)


def test_older_releases_keep_windows_whole() -> None:
    assert total(gpt_oss(), "tensorrt-llm@1.3.0rc27", 1024) == 1024 * 24 * 2048
    assert any("--max-attention-window" in text for text in texts(ask(gpt_oss(), "tensorrt-llm@1.2", 1024)))
    # Ten requests: a prompt has all its blocks until its step ends, the others 5 blocks of their windows.
    assert total(gpt_oss(), "tensorrt-llm@1.3.0rc27", 4096, 10) == 10 * 4096 * 24 * 2048
    blocks = 10 * (128 + 5) + (128 - 5)
    for release in ("1.3.0rc28", "nightly"):
        pages = -(-blocks * 786_432 // PAGE)
        assert total(gpt_oss(), f"tensorrt-llm@{release}", 4096, 10) == pages * PAGE
    assert total(gemma4(), "tensorrt-llm@1.3.0rc20", 4096) == 99 * PAGE


def test_a_length_for_the_pools_is_not_ignored_in_silence() -> None:
    average = {"avg-seq-len": "512"}
    said = "--avg-seq-len changes nothing: TensorRT-LLM has one pool"
    for engine, config, is_said in (
        (POOLS, gpt_oss(), False),
        ("tensorrt-llm", gpt_oss(), True),
        ("tensorrt-llm", gemma4(), False),
    ):
        assert any(said in text for text in texts(ask(config, engine, 1024, settings=average))) is is_said


def test_a_window_that_is_given_counts_instead() -> None:
    """One window that is as long as the requests restores one pool for all layers."""
    given = {"max-attention-window": "131072"}
    assert total(gpt_oss(), POOLS, 1024, settings=given) == 32 * 2 * 786_432
    half = {"max-attention-window": "256,131072"}
    found = ask(gemma4(), "tensorrt-llm", 4096, settings=half)["engine"]["window_pools"]
    assert [(pool["window"], pool["num_layers"]) for pool in found] == [(256, 6), (None, 6)]


def test_a_common_prefix_is_kept_once_but_of_windows_only_the_last_one() -> None:
    spec = kvcalc.read_config(gemma4(), "test", "test")
    asked = {"engine": "tensorrt-llm", "context_tokens": 8192, "batch_size": 8}
    alone = estimate(spec, **asked)
    shared = estimate(spec, **asked, reuse=kvcalc.CacheReuse(prefix_tokens=4096))
    assert shared["reuse"]["prefix"]["shared_tokens"] == 4096
    # 128 full blocks, and 16 of the window.
    assert shared["reuse"]["prefix"]["kept_bytes"] == 128 * FULL + 16 * SLIDING
    assert shared["kv_cache"]["total_bytes"] < alone["kv_cache"]["total_bytes"]
    assert sum(line["bytes"] for line in shared["engine"]["pool_lines"]) == shared["kv_cache"]["bytes_per_device"]


def test_what_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not run Gemma 4 with --pp"):
        ask(gemma4(), "tensorrt-llm", 4096, pipeline_parallel_size=2)
    stages = ask(gpt_oss(), POOLS, 4096, pipeline_parallel_size=2)["kv_cache"]
    assert stages["bytes_per_device"] * 2 == stages["devices_total_bytes"] == total(gpt_oss(), POOLS, 4096)
    with pytest.raises(ModelError, match="no class for gemma3n_text"):
        estimate(kvcalc.load_model("gemma-3n-e4b"), engine="tensorrt-llm")


def test_a_page_of_memory_grows_with_the_pool() -> None:
    assert [page_bytes(size << 30) // MIB for size in (0, 1, 2, 5, 8, 16, 100)] == [2, 2, 4, 8, 16, 32, 32]


def test_a_group_that_needs_more_than_its_part_has_its_floor() -> None:
    states, blocks = Group((3 * MIB, MIB), (STATE,)), Group((MIB,), (None,))
    division = Division(
        [blocks, states], 32, [Sequences(32 * 100, 3199)], least_slots([blocks, states], 32, [[Sequences(0, 0, 9)]])
    )
    assert division.floors == (1, 9)
    # 9 states are 14 + 5 pages of 2 MiB, and the blocks have the other 31.
    assert division.slots(100 * MIB) == [62, 9]
    assert division.smallest([62, 9]) == 100 * MIB


@pytest.mark.parametrize(("window", "pages"), [(1024, 10), (1025, 11)])
def test_without_an_average_the_proportion_is_that_of_one_token_after_2048(window: int, pages: int) -> None:
    """The windows keep the last `window` of 2,049 tokens, and the other layers all: 9 pages of 2 MiB.

    A block of one token has 10 x 2,048 bytes in the windows, and 2 x 4,096 in the other layers.
    """
    settings = {"tokens-per-block": "1", "max-attention-window": ",".join([str(window)] * 5 + ["131072"])}
    found = ask(gemma4(), "tensorrt-llm", 4096, kv_memory_bytes=1024 * MIB, settings=settings)["engine"]
    sliding = round(512 * pages / (pages + 9))
    blocks = [pool["num_gpu_blocks"] for pool in found["window_pools"]]
    assert blocks == [sliding * PAGE // (10 * 2048), (512 - sliding) * PAGE // (2 * 4096)]
