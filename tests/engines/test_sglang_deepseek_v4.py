"""DeepSeek-V4's pools in SGLang."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.throughput.hardware import Devices, find_gpu
from tests.documents import estimate
from tests.engines.shapes import renamed

FLASH = "deepseek-v4-flash"
# By hand, from the tensors' shapes in deepseek_v4_memory_pool.py: a page of 256 rows of 584 bytes is padded to 149,760,
# a page of 64 rows to 37,440, and a page of 2 rows to 1,728.
WINDOW_PAGE, SPARSE_PAGE, HEAVY_PAGE = 149_760, 37_440, 1_728


def ask(model: str = FLASH, **asked: Any) -> dict[str, Any]:
    asked = {"engine": "sglang", "context_tokens": 32_768, "batch_size": 2, **asked}
    return estimate(kvcalc.load_model(model), **asked)


def lines(found: dict[str, Any]) -> dict[str, int]:
    assert sum(line["bytes"] for line in found["engine"]["pool_lines"]) == found["kv_cache"]["bytes_per_device"]
    return {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}


def test_the_pools_of_flash_with_a_ratio() -> None:
    settings = {"swa-full-tokens-ratio": "0.1", "max-running-requests": "4"}
    found = ask(engine_settings=settings)
    full, windows = 65_536, 6400
    assert found["engine"]["max_total_num_tokens"] == full
    assert found["engine"]["swa_max_total_num_tokens"] == windows
    pools = (
        43 * (windows // 256 + 1) * WINDOW_PAGE
        + 21 * ((full // 4 + 256) // 64) * (SPARSE_PAGE + 64 * 132)
        + 20 * ((full // 128 + 256) // 2) * HEAVY_PAGE
    )
    # 25 pages of windows have 200 rows of states, with 9 more rounded to 212, of 4 x (512 + 128) elements in fp32.
    states = 21 * 212 * 4 * (512 + 128) * 4 + 20 * (5 * 128 + 256) * 2 * 512 * 4
    table = 5 * (1_048_576 + 4) * 4
    assert found["kv_cache"]["total_bytes"] == pools + states + table
    assert lines(found)["request table"] == table


def test_the_windows_have_room_for_256_requests_and_the_prefixes_that_are_kept() -> None:
    """By default 256 requests: 128 + 128 + 256 + 256 tokens each, 4 prefixes of 128 + 256 each, and two chunks."""
    windows = 256 * 768 + 2 * 8192 + 256 + 4 * 256 * 384
    assert windows == 606_464
    assert ask()["engine"]["swa_max_total_num_tokens"] == windows
    assert ask(context_tokens=100, batch_size=1)["engine"]["swa_max_total_num_tokens"] == windows
    few = ask(engine_settings={"max-running-requests": "8"})["engine"]
    assert few["swa_max_total_num_tokens"] == 8 * 768 + 2 * 8192 + 256 + 4 * 8 * 384
    large = ask(devices=Devices(find_gpu("b200"), 4), tensor_parallel_size=4)["engine"]
    assert large["swa_max_total_num_tokens"] == windows + 2 * 8192


def test_fewer_windows_are_kept_without_prefixes_or_without_steps_in_advance() -> None:
    """Without the radix cache no prefix is kept, and without overlapping steps one chunk is computed at a time.

    Source: _resolve_swa_prefix_tails and compute_swa_request_cap, SGLang 0.5.21 to 0.5.23. A step that checks drafts
    takes the tokens of two steps in advance with overlap, else its own in whole pages.
    """

    def windows(*names: str, drafts: int | None = None) -> int:
        settings = {"max-running-requests": "8", **dict.fromkeys(names, True)}
        if drafts is not None:
            settings["speculative-num-draft-tokens"] = str(drafts)
        return int(ask(engine_settings=settings)["engine"]["swa_max_total_num_tokens"])

    assert windows() - windows("disable-radix-cache") == 4 * 8 * 384
    assert windows() - windows("disable-overlap-schedule") == 8192
    assert windows(drafts=2) - windows() == 8 * (128 + 2 * 2 - 256) + 224  # whole pages
    assert windows("disable-overlap-schedule", drafts=2) - windows("disable-overlap-schedule") == 8 * 128


def test_a_server_without_a_ratio_sizes_its_windows_first() -> None:
    """calculate_pool_sizes: the tokens share the memory that the windows of 256 requests and their states leave.

    A window slot is a padded row in all 43 layers, and 8 of 256 rows of 4 x (512 + 128) states in fp32 in 21 layers.
    """
    memory, windows = 30 * 2**30, 606_464
    states = 20 * ((257 + 1) * 128 + 128) * 2 * 512 * 4
    slot = 43 * WINDOW_PAGE / 256 + 21 * 8 * 4 * (512 + 128) * 4 / 256
    token = 21 * (SPARSE_PAGE / 64 + 132) / 4 + 20 * HEAVY_PAGE / 2 / 128
    found = ask(kv_memory_bytes=memory)["engine"]
    assert found["swa_max_total_num_tokens"] == windows
    assert found["kv_cache_tokens"] == int((memory - states - windows * slot) / token) // 256 * 256
    # With a ratio, every token pays for its part of a window slot, and nothing is taken before.
    found = ask(kv_memory_bytes=memory, engine_settings={"swa-full-tokens-ratio": "0.25"})["engine"]
    assert found["kv_cache_tokens"] == int((memory - states) / (token + slot / 4)) // 256 * 256


@pytest.mark.parametrize(("release", "rate"), [("0.5.20", 7705.45), ("0.5.14", 7705.45 + 0.1 * 20 * 2 * 512 * 4)])
def test_the_bytes_of_a_token_before_the_padding_are_those_of_logs(release: str, rate: float) -> None:
    """bytes_per_full_token=7705.45 in public logs: 0.1 of a window row per layer, with states for every 128 tokens.

    Before 0.5.15 a window row also had the states of entries of 128 tokens, one each.
    """
    settings = {"max-running-requests": "4"}
    found = ask(engine=f"sglang@{release}", engine_settings=settings, kv_memory_bytes=2**33)["engine"]
    states = 20 * (6 * 128 + 128) * 2 * 512 * 4 if release == "0.5.20" else 0
    assert found["kv_cache_tokens"] == int((2**33 - states) / rate) // 256 * 256


def test_the_pools_of_flash_before_the_padding() -> None:
    """By hand, from create_buffer and CompressStatePool of 0.5.13: pages of 128 windows, of 64 and of 2 entries."""
    settings = {"max-running-requests": "4"}
    full, windows = 65_536, 6400
    pools = 43 * (windows // 128 + 1) * 74_880
    pools += 21 * (full // 4 // 64 + 1) * (SPARSE_PAGE + 64 * 132) + 20 * (full // 128 // 2 + 1) * HEAVY_PAGE
    sparse = 21 * (windows // 128 * 8 + 12) * 4 * (512 + 128) * 4
    table = 5 * (1_048_576 + 4) * 4
    for release, heavy in (("0.5.20", 5 * 128 + 256), ("0.5.13", windows + 256)):
        found = ask(engine=f"sglang@{release}", engine_settings=settings)
        assert found["engine"]["swa_max_total_num_tokens"] == windows
        assert found["kv_cache"]["total_bytes"] == pools + sparse + 20 * heavy * 2 * 512 * 4 + table


def test_drafting_takes_longer_rings_and_the_windows_of_a_layer() -> None:
    settings = {"swa-full-tokens-ratio": "0.5", "max-running-requests": "4"}
    plain, drafted = ask(engine_settings=settings), ask(engine_settings=settings, speculative=Speculation("mtp", 1))
    rows = lines(drafted)["full compressor states in fp32"] - lines(plain)["full compressor states in fp32"]
    assert rows == 21 * (128 * 8 + 8) * 4 * 640 * 4 + 20 * (6 * 256 + 128 - 6 * 128 - 128) * 2 * 512 * 4
    assert drafted["speculative"]["cache_bytes"] > rows + 128 * WINDOW_PAGE


@pytest.mark.parametrize("name", [FLASH, "deepseek-v4-pro"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_lines_and_the_rows_add_up(name: str, stages: int) -> None:
    for settings in ({}, {"swa-full-tokens-ratio": "0.2"}):
        for tokens, batch in ((1, 1), (130, 3), (100_000, 7)):
            found = ask(
                name, engine_settings=settings, context_tokens=tokens, batch_size=batch, pipeline_parallel_size=stages
            )
            assert all(size > 0 for size in lines(found).values() if size is not None) or tokens == 1


def test_the_longest_context_and_the_largest_batch_fit() -> None:
    memory = 60 * 2**30
    fit = ask(kv_memory_bytes=memory)["fit"]
    assert ask(context_tokens=fit["memory_context_tokens"])["kv_cache"]["bytes_per_device"] <= memory
    assert ask(context_tokens=fit["memory_context_tokens"] + 1)["kv_cache"]["bytes_per_device"] > memory
    given = {"max-running-requests": "300"}
    most = ask(kv_memory_bytes=memory, engine_settings=given)["fit"]["max_batch_size"]
    assert 256 < most < 300
    assert ask(batch_size=most, engine_settings=given)["kv_cache"]["bytes_per_device"] <= memory
    assert ask(batch_size=most + 1, engine_settings=given)["kv_cache"]["bytes_per_device"] > memory
    # Without the option, a server runs 256 requests, and the memory would hold more.
    assert fit["max_batch_size"] == 256


def test_the_cache_is_in_fp8_and_pages_have_256_tokens() -> None:
    assert ask()["kv_cache"]["dtype"] == "fp8"
    with pytest.raises(UsageError, match="keeps DeepSeek-V4's cache in fp8"):
        ask(kv_dtype="bf16")
    with pytest.raises(UsageError, match="--page-size 64"):
        ask(engine_settings={"page-size": "64"})


def test_a_refused_page_says_what_to_type() -> None:
    spec = kvcalc.load_model("deepseek-v4-flash")
    with pytest.raises(UsageError, match="needs pages of 256 tokens") as refused:
        load_engine("sglang", spec, {"page-size": "64"})
    assert refused.value.hint == "use --page-size 256"


def test_rates_and_widths_that_the_pools_do_not_have_are_refused() -> None:
    """The pools have rows of 448 + 64 elements, entries of 4 or 128 tokens, and index keys in groups of 128."""
    small = renamed(
        "deepseek_v4", num_hidden_layers=3, num_attention_heads=8, hidden_size=1024, head_dim=512,
        num_key_value_heads=1, qk_rope_head_dim=64, sliding_window=128, index_head_dim=128, index_topk=512,
        compress_ratios=[0, 4, 128],
    )  # fmt: skip
    assert load_engine("sglang", kvcalc.read_config(small, "test", "test")).page == 256  # type: ignore[attr-defined]
    for more in ({"head_dim": 256}, {"index_head_dim": 192}, {"compress_rate_csa": 8}, {"compress_rate_hca": 64}):
        with pytest.raises(ModelError, match="compresses rows of 512 elements by 4 with an indexer and by 128"):
            load_engine("sglang", kvcalc.read_config({**small, **more}, "test", "test"))


def test_the_rules_begin_with_their_releases() -> None:
    """DSV4PoolConfigurator in the wheels. From 0.5.21 on the windows follow the requests, before 0.1 of the tokens.

    Entries of 128 tokens have states for every request since 0.5.15. Before, every page of windows had them.
    """
    found = {
        release: ask(engine=f"sglang@{release}", engine_settings={"max-running-requests": "8"})
        for release in ("0.5.23", "0.5.21", "0.5.20", "0.5.15", "0.5.14")
    }
    windows = [answer["engine"]["swa_max_total_num_tokens"] for answer in found.values()]
    assert windows == [35_072, 35_072, 6400, 6400, 6400]
    newest, of_21, of_20, of_15, of_14 = (lines(answer)["full compressor states in fp32"] for answer in found.values())
    assert (newest, of_20) == (of_21, of_15)
    assert of_14 - of_15 == 20 * ((6400 + 256) - (10 * 128 + 128)) * 2 * 512 * 4
