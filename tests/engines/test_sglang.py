"""SGLang's pools, computed by hand. A token of `plain()` has 2 layers x 2 heads x 128 elements, 1,024 bytes."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from tests.documents import texts
from tests.engines.models import ask, gated_delta, gpt_oss, latent, lines, plain, sparse, total

TOKEN = 1024


def test_tokens_take_rows_and_a_dummy_page_stands_beside() -> None:
    assert total(plain(), "sglang", 100, 3) == (300 + 1) * TOKEN
    # With pages of 64, 100 tokens take 128 rows.
    assert lines(plain(), "sglang", 100, 3, settings={"page-size": "64"}) == {
        "stored": 300 * TOKEN, "pages rounded up": 3 * 28 * TOKEN, "dummy page": 64 * TOKEN,
    }  # fmt: skip


def test_heads_are_divided_and_replicated_and_the_latent_is_whole() -> None:
    assert ask(plain(), "sglang", 100, tensor_parallel_size=8)["kv_cache"]["bytes_per_device"] == 101 * TOKEN // 2
    assert ask(latent(), "sglang", 100, tensor_parallel_size=8)["kv_cache"]["bytes_per_device"] == 101 * 3 * 576 * 2


def test_memory_holds_whole_pages_the_dummy_page_not_reckoned_in() -> None:
    found = ask(plain(), "sglang", 100, settings={"page-size": "64"}, kv_memory_bytes=1000 * TOKEN)["engine"]
    # 1,000 tokens are 15 whole pages, and a request takes two.
    assert (found["kv_cache_tokens"], found["num_gpu_blocks"], found["max_concurrency"]) == (960, 15, 7.5)
    assert (found["max_total_num_tokens"], found["swa_max_total_num_tokens"]) == (128, None)


@pytest.mark.parametrize(
    ("dtype", "token_bytes"), [("fp8", 512), ("mxfp8", 512 + 512 // 32), ("nvfp4", 256 + 512 // 16)]
)
def test_small_types_carry_their_scales(dtype: str, token_bytes: int) -> None:
    assert total(plain(), "sglang", 99, kv_dtype=dtype) == 100 * token_bytes


def test_sparse_attention_keeps_packed_records_and_its_indexer() -> None:
    # 64 tokens and the dummy page of 64. fp8 takes 512 + 16 + 128 bytes, bf16 1,152, and the indexer's key 128 + 4.
    assert total(sparse(), "sglang", 64, kv_dtype="fp8") == 128 * 3 * (656 + 132)
    assert total(sparse(), "sglang", 64, kv_dtype="bf16") == 128 * 3 * (1152 + 132)


def test_windows_have_a_pool_of_their_own() -> None:
    # 12 + 12 layers of 2,048 bytes per token, 10,000 tokens, 8,000 in the window pool, and one dummy row in each.
    row = 12 * 2048
    assert total(gpt_oss(), "sglang", 10000) == (10001 + 8001) * row
    assert total(gpt_oss(), "sglang", 10000, settings={"swa-full-tokens-ratio": "0.25"}) == (10001 + 2501) * row
    # Slightly more than 10,000 x 1.8 rows, because SGLang divides in floating point.
    found = ask(gpt_oss(), "sglang", 10000, kv_memory_bytes=18000 * row + 1)["engine"]
    assert (found["kv_cache_tokens"], found["swa_max_total_num_tokens"]) == (10000, 8000)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("ratio", ["0.01", "0.07", "0.29", "0.57", "0.58", "0.8", "1.0"])
def test_the_pools_are_the_smallest_with_room_for_all_tokens_and_all_windows(ratio: str, page: int) -> None:
    """SGLang computes the window pool's tokens in floating point: 0.29 of 100 tokens are 28."""

    def of_windows(full: int) -> int:
        return int(full * float(ratio)) // page * page

    for tokens, batch in ((129, 1), (1000, 3), (5000, 7)):
        settings = {"swa-full-tokens-ratio": ratio, "page-size": str(page)}
        found = ask(gpt_oss(), "sglang", tokens, batch, settings=settings)["engine"]
        full, windows = found["max_total_num_tokens"], found["swa_max_total_num_tokens"]
        in_pages = batch * -(-tokens // page) * page
        needed = max(-(-(127 + page + 1) // page) * page, batch * -(-128 // page) * page)
        assert full >= in_pages
        assert windows == of_windows(full) >= needed
        assert full == in_pages or of_windows(full - page) < needed


def test_hicache_keeps_the_windows_of_a_model_that_has_nothing_else() -> None:
    spec = kvcalc.read_config({**gpt_oss(), "layer_types": ["sliding_attention"] * 24}, "test", "test")
    prefixes = load_engine("sglang", spec).prefixes(spec, DTYPES["bf16"])
    sizes = [prefixes.tier_bytes(*tokens) for tokens in ((100,), (128,), (9000,), (9000, 8900), (9000, 9000))]
    assert sizes == [tokens * 24 * 2048 for tokens in (100, 128, 128, 100, 0)]


def test_the_window_pool_holds_at_least_a_window_and_a_page() -> None:
    # gpt-oss's own window is 127 tokens for SGLang, which does not start with 127 + 1 rows. It starts with 129 rows,
    # which is 80% of 162 tokens.
    found = ask(gpt_oss(), "sglang", 8)["engine"]
    assert (found["max_total_num_tokens"], found["swa_max_total_num_tokens"]) == (162, 129)


FOR_REQUESTS: dict[str, Any] = {"disable-radix-cache": True, "max-running-requests": "16"}


@pytest.mark.parametrize(("settings", "full", "windows"), [
    ({}, 154_265, 20_497),
    ({"page-size": "64"}, 152_128, 22_592),
    ({"disable-overlap-schedule": True}, 162_457, 12_305),
    ({"chunked-prefill-size": "2048"}, 166_553, 8_209),
    ({"speculative-num-draft-tokens": "4"}, 148_009, 26_753),
    ({"speculative-num-draft-tokens": "4", "page-size": "64"}, 146_880, 27_840),
    ({"speculative-num-draft-tokens": "4", "disable-overlap-schedule": True}, 156_265, 18_497),
    ({"speculative-num-draft-tokens": "4", "disable-overlap-schedule": True, "page-size": "64"}, 154_176, 20_544),
    ({"max-total-tokens": "50000"}, 50_000, 20_497),
    ({"max-total-tokens": "20000"}, 20_000, 20_000),
])  # fmt: skip
def test_without_a_radix_cache_the_window_pool_is_sized_for_the_requests(
    settings: dict[str, Any], full: int, windows: int
) -> None:
    """gpt-oss-20b, 16 requests and 4 GiB: the numbers are those of SGLang's own code.

    The methods of SWAChunkCapPoolConfigurator (0.5.21) and SWARequestCapPoolConfigurator (0.5.22, 0.5.23) were run on
    these options, with 24,576 bytes for a token in the 12 layers of each kind. They agree.
    """
    asked = {**FOR_REQUESTS, **settings}
    found = ask(gpt_oss(), "sglang", 1000, kv_memory_bytes=4 * 2**30, settings=asked)["engine"]
    assert (found["kv_cache_tokens"], found["swa_max_total_num_tokens"]) == (full, windows)
    # A batch has its own tokens in the full pool, whatever the ratio.
    page, row = int(asked.get("page-size", 1)), 12 * 2048
    for ratio in ("0.1", "0.8"):
        pools = {**asked, "swa-full-tokens-ratio": ratio}
        size = sum(lines(gpt_oss(), "sglang", 1280, 3, settings=pools).values())
        table = lines(gpt_oss(), "sglang", 1280, 3, settings=pools)["request table"]
        assert size - table == (3 * 1280 + page + windows + page) * row


@pytest.mark.parametrize(("model", "window"), [("gpt-oss-20b", 127), ("mimo-v2-flash", 128), ("step-3.5-flash", 512)])
def test_a_window_has_the_tokens_before_the_newest_one_or_the_newest_one_too(model: str, window: int) -> None:
    """get_attention_sliding_window_size of GptOssForCausalLM is 127 for a window of 128.

    MiMo-V2 and Step-3.5 have no such method, so the number of the config counts: 128 and 512 (SGLang 0.5.23).
    """
    rules = load_engine("sglang", kvcalc.load_model(model), FOR_REQUESTS)
    assert rules.blocks(rules.spec, DTYPES["bf16"], 1000, 1, None).own["swa_max_total_num_tokens"] == (
        16 * (window + 128 + 1 + 1) + 2 * 8192 + 1
    )


def test_the_ratio_counts_with_a_radix_cache_without_a_number_of_requests_and_before_0_5_14() -> None:
    """is_applicable of SWAChunkCapPoolConfigurator, which 0.5.13.post1 does not have."""

    def windows(engine: str = "sglang", **more: Any) -> int:
        settings = {name.replace("_", "-"): text for name, text in more.items()}
        return int(ask(gpt_oss(), engine, 1000, settings=settings)["engine"]["swa_max_total_num_tokens"])

    both: dict[str, Any] = {"disable_radix_cache": True, "max_running_requests": "16"}
    assert windows(disable_radix_cache=True) == windows(max_running_requests="16") == 800
    assert windows("sglang@0.5.13.post1", **both) == 800
    assert windows("sglang@0.5.14", **both) == windows(**both) == 20_497
    # While tokens are drafted, 48 requests run if no number is given.
    drafts: dict[str, Any] = {"disable_radix_cache": True, "speculative_num_draft_tokens": "4"}
    assert windows(**drafts) == windows(**drafts, max_running_requests="48")


def test_the_window_pool_holds_the_windows_of_the_batch() -> None:
    # Four sequences of 100 need 400 rows in the window pool, 80% of 500 tokens. Four of 200 need 4 x 128 of 800.
    row = 12 * 2048
    assert lines(gpt_oss(), "sglang", 100, 4) == {
        "stored": 2 * 400 * row, "tokens required by the window pool's ratio": 100 * row, "dummy page": 2 * row,
    }  # fmt: skip
    found = ask(gpt_oss(), "sglang", 200, 4)["engine"]
    assert (found["max_total_num_tokens"], found["swa_max_total_num_tokens"]) == (800, 640)


def test_other_windows_are_kept_whole() -> None:
    config = plain(model_type="mistral", sliding_window=64)
    assert total(config, "sglang", 1000) == 1001 * TOKEN
    assert lines(config, "sglang", 1000)["windows kept whole"] == 936 * TOKEN


def test_the_request_table_is_counted_where_its_rows_are_known() -> None:
    # 16 requests and a spare row, each of 4,096 + 4 indices of 4 bytes.
    settings = {"max-running-requests": "16", "context-length": "4096"}
    assert lines(plain(), "sglang", 100, settings=settings)["request table"] == 17 * 4100 * 4
    answer = ask(plain(), "sglang", 100)
    assert answer["engine"]["max_running_requests"] is None
    assert any("request table" in warning for warning in texts(answer))


def test_states_have_a_pool_with_a_dummy_of_its_own() -> None:
    # 30 layers x (8,192 channels x 3 in bf16 + 524,288 in fp32).
    state, token = 30 * (8192 * 3 * 2 + 524288 * 4), 10 * 1024 * 2
    plain = {"disable-radix-cache": True}
    assert total(gated_delta(), "sglang", 100, 2, settings=plain) == 201 * token + 3 * state
    # With the prefix cache, a request has five states, because steps overlap.
    assert total(gated_delta(), "sglang", 100, 2) == 201 * token + 11 * state
    settings = {"max-mamba-cache-size": "186"}
    assert total(gated_delta(), "sglang", 100, settings=settings) == 101 * token + 187 * state
    # The states take their memory first.
    found = ask(gated_delta(), "sglang", 100, settings=settings, kv_memory_bytes=187 * state + 500 * token)["engine"]
    assert found["kv_cache_tokens"] == 500


def test_the_states_take_a_share_of_the_memory_if_their_number_is_not_given() -> None:
    """0.9 of the tokens' memory: of 190 states' memory 90, one of which is spare. _handle_max_mamba_cache."""
    state, token = 30 * (8192 * 3 * 2 + 524288 * 4), 10 * 1024 * 2
    memory = 190 * state
    found = ask(gated_delta(), "sglang", 100, kv_memory_bytes=memory)["engine"]
    assert found["kv_cache_tokens"] == (memory - 90 * state) // token
    for wrong in ("0", "-1", "nan", "a"):
        with pytest.raises(UsageError, match="--mamba-full-memory-ratio"):
            ask(gated_delta(), "sglang", 100, settings={"mamba-full-memory-ratio": wrong})
    half = {"mamba-full-memory-ratio": "0.5"}
    found = ask(gated_delta(), "sglang", 100, kv_memory_bytes=memory, settings=half)["engine"]
    assert found["kv_cache_tokens"] == (memory - 63 * state) // token
    # While 4 tokens are checked, 9 in 5 states' memory: (90 - 5) / 1.8 = 47 states, of which 9 requests run.
    drafts = {"speculative-num-draft-tokens": "4"}
    found = ask(gated_delta(), "sglang", 100, kv_memory_bytes=memory, settings=drafts)["engine"]
    assert found["kv_cache_tokens"] == (memory - (48 + 10 * 4) * state) // token
    alone = {"disable-radix-cache": True, "max-running-requests": "8"}
    found = ask(gated_delta(), "sglang", 100, kv_memory_bytes=memory, settings=alone)["engine"]
    assert found["kv_cache_tokens"] == (memory - 9 * state) // token


def test_requests_with_states_run_as_far_as_their_tokens_have_room() -> None:
    rules = load_engine("sglang", kvcalc.read_config(gated_delta(), "test", "test"))
    memory = 20 * 2**30
    pool = rules.blocks(rules.spec, DTYPES["bf16"], 1, 1, memory).pool
    assert pool is not None
    assert pool.kv_cache_tokens is not None
    tokens = pool.kv_cache_tokens
    most = rules.max_running_requests(rules.spec, DTYPES["bf16"], memory)
    assert most is not None
    for length in (1, 1000, 20_000, tokens):
        found = rules.max_running_requests(rules.spec, DTYPES["bf16"], memory, length)
        assert found == min(most, tokens // length)
    assert tokens // 20_000 < most
    # A prefix of 10,000 tokens is kept once.
    shared = rules.max_running_requests(rules.spec, DTYPES["bf16"], memory, 20_000, 10_000)
    assert shared == min(most, (tokens - 10_000) // 10_000)


@pytest.mark.parametrize(("lengths", "settings", "most"), [
    (6, {}, 6 * 512), (3, {}, 2048), (9, {}, 4096), (6, {"context-length": "65536"}, 4096),
    (6, {"context-length": "262144"}, 2048), (6, {"max-running-requests": "7"}, 7),
])  # fmt: skip
def test_512_requests_run_for_each_of_full_length_within_limits(
    lengths: int, settings: dict[str, str], most: int
) -> None:
    """From 2,048 to 4,096 without a number (resolve_max_num_reqs, SGLang 0.5.23). Full length is the model's own."""
    rules = load_engine("sglang", kvcalc.load_model("llama-3.1-8b"), settings)
    # A token takes 128 KiB, and the length of the model is 131,072.
    memory = lengths * 131_072 * 2 * 32 * 8 * 128 * 2 + 1
    assert rules.max_running_requests(rules.spec, DTYPES["bf16"], memory) == most


def test_what_sglang_refuses() -> None:
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        ask(gpt_oss(), "sglang", 8, settings={"swa-full-tokens-ratio": "1.5"})
    with pytest.raises(UsageError, match="shorter than the context"):
        ask(plain(), "sglang", 8, settings={"context-length": "4"})
    with pytest.raises(UsageError, match="pages of 64"):
        ask(sparse(), "sglang", 8, settings={"page-size": "1"})
    with pytest.raises(UsageError, match=r"not modelled for .* in SGLang"):
        ask(plain(), "sglang", 8, kv_dtype="q8_0")
    with pytest.raises(ModelError, match="rwkv is not modelled"):
        ask({"model_type": "rwkv", "num_hidden_layers": 1, "hidden_size": 64, "attention_hidden_size": 64,
             "torch_dtype": "bfloat16"}, "sglang", 8)  # fmt: skip
