"""The states that SGLang keeps while drafted tokens are checked."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.errors import UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate

# Qwen3.5-9B: 32 layers, of which every fourth has attention.
QWEN = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "hidden_size": 4096, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "torch_dtype": "bfloat16",
    "intermediate_size": 12_288, "vocab_size": 248_320, "max_position_embeddings": 262_144,
}  # fmt: skip
STATE = 24 * 32 * 128 * 128 * 4
COLUMN = 24 * (2 * 16 * 128 + 32 * 128) * 2


def ask(speculative: Speculation | None, model: Any = QWEN, **asked: Any) -> dict[str, Any]:
    spec = kvcalc.read_config(model, "qwen3.5-9b", "") if isinstance(model, dict) else kvcalc.load_model(model)
    asked = {"engine": "sglang", "context_tokens": 8192, "batch_size": 4, **asked}
    return estimate(spec, speculative=speculative, **asked)


def lines(found: dict[str, Any]) -> dict[str, int]:
    assert sum(line["bytes"] for line in found["engine"]["pool_lines"]) == found["kv_cache"]["bytes_per_device"]
    return {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}


def test_every_checked_token_has_a_state_in_every_slot() -> None:
    """A public log: 64 requests and 16 checked tokens take 48.75 GB of states and 0.43 GB of inputs."""
    settings = {"max-running-requests": "64", "max-mamba-cache-size": "64", "disable-radix-cache": True}
    found = lines(ask(Speculation("ngram", 15), engine_settings={**settings, "speculative-eagle-topk": "1"}))
    assert found["states for checking drafts"] == 65 * 16 * STATE
    assert round(found["states for checking drafts"] / 2**30, 2) == 48.75
    assert found["convolution inputs for checking drafts"] == 65 * (16 + 4 - 2) * COLUMN
    assert round(found["convolution inputs for checking drafts"] / 2**30, 2) == 0.43


def test_no_more_requests_run_than_have_states() -> None:
    """With the prefix cache, a request has five states: 64 are enough for 12."""
    settings = {"max-running-requests": "64", "max-mamba-cache-size": "64"}
    assert lines(ask(Speculation("ngram", 3), engine_settings=settings))["states for checking drafts"] == 13 * 4 * STATE


def test_the_slots_follow_the_batch_without_a_limit_on_requests() -> None:
    found = lines(ask(Speculation("draft", 3, draft_model=kvcalc.load_model("qwen3-0.6b"))))
    assert found["states for checking drafts"] == 5 * 4 * STATE
    assert found["convolution inputs for checking drafts"] == 5 * (4 + 4 - 2) * COLUMN


def test_trees_keep_the_inputs_of_every_token() -> None:
    found = lines(ask(Speculation("ngram", 3)))
    assert found["convolution inputs for checking drafts"] == 5 * 4 * 3 * COLUMN
    kimi = lines(ask(None, "kimi-linear-48b", engine_settings={"speculative-num-draft-tokens": "4"}))
    column = 20 * 3 * 32 * 128 * 2
    assert kimi["convolution inputs for checking drafts"] == 5 * 4 * 3 * column


def test_the_states_are_divided_like_the_models() -> None:
    for size in (2, 4):
        found = lines(ask(Speculation("ngram", 3), tensor_parallel_size=size))
        assert found["states for checking drafts"] == 5 * 4 * STATE // size


def test_a_model_without_states_keeps_none() -> None:
    found = lines(ask(Speculation("eagle", 3), "llama-3.1-8b"))
    assert not {"states for checking drafts", "convolution inputs for checking drafts"} & set(found)


@pytest.mark.parametrize(
    ("settings", "limit"), [({}, 48), ({"max-running-requests": "16"}, 16), ({"max-mamba-cache-size": "9"}, 9 // 5)]
)
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_the_largest_batch_is_the_largest_that_fits(settings: dict[str, str], limit: int, batch: int) -> None:
    asked = Speculation("ngram", 3)
    memory = ask(asked, batch_size=batch, engine_settings=settings)["kv_cache"]["bytes_per_device"]
    # A server may leave too little for tokens or states in exactly this memory. In twice of it, it runs them.
    for memory_bytes, least in ((memory, 0), (2 * memory, batch)):
        fit = ask(asked, engine_settings=settings, kv_memory_bytes=memory_bytes)["fit"]
        most = fit["max_batch_size"]
        assert min(least, limit) <= most <= limit
        for number in (max(1, most), most + 1):
            found = ask(asked, batch_size=number, engine_settings=settings, kv_memory_bytes=memory_bytes)
            running = found["engine"]["max_concurrency"]
            fits = found["kv_cache"]["bytes_per_device"] <= memory_bytes and number <= running
            assert found["fit"]["fits"] == fits == (number <= most)


def test_the_option_must_agree_with_the_drafted_tokens() -> None:
    """SGLang counts the token before the drafted ones."""
    same = ask(Speculation("ngram", 3), engine_settings={"speculative-num-draft-tokens": "4"})
    assert same["engine"]["speculative_num_draft_tokens"] == 4
    with pytest.raises(UsageError, match="--speculative-num-draft-tokens 3 contradicts"):
        ask(Speculation("ngram", 3), engine_settings={"speculative-num-draft-tokens": "3"})


def test_the_draft_model_shares_the_request_table() -> None:
    settings = {"max-running-requests": "9"}
    small = Speculation("draft", 3, draft_model=kvcalc.load_model("llama-3.2-1b"))
    with_table, without = lines(ask(small, "llama-3.1-8b", engine_settings=settings)), lines(ask(small, "llama-3.1-8b"))
    assert with_table["cache of the draft model"] == without["cache of the draft model"]
    assert with_table["request table"] == 10 * (131_072 + 8) * 4


def test_the_request_table_has_room_for_drafts() -> None:
    plain = lines(ask(None, "llama-3.1-8b", engine_settings={"max-running-requests": "9"}))
    drafts = lines(ask(Speculation("ngram", 3), "llama-3.1-8b", engine_settings={"max-running-requests": "9"}))
    assert drafts["request table"] - plain["request table"] == 10 * 4 * 4
    settings = {"max-running-requests": "9", "page-size": "64"}
    paged = lines(ask(Speculation("ngram", 3), "llama-3.1-8b", engine_settings=settings))
    assert paged["request table"] - plain["request table"] == 10 * (2 * 4 + 64 - 1 - 4) * 4


@pytest.mark.parametrize(
    ("engine", "model", "method", "tables"),
    [
        # sgl-project/sglang#35996: the MTP head of a model of 248,320 x 5,120 took 5.18 GB, of which a layer is 0.44.
        ("sglang", "qwen3.6-27b", "mtp", 2 * 248_320 * 5120 * 2),
        ("sglang@0.5.14", "qwen3.6-27b", "mtp", 2 * 248_320 * 5120 * 2),
        ("sglang@0.5.13", "qwen3.6-27b", "mtp", 0),
        ("sglang", "llama-3.1-8b", "eagle", 128_256 * 4096 * 2),
        ("sglang", "llama-3.1-8b", "eagle1", 2 * 128_256 * 4096 * 2),
        ("sglang", "llama-3.1-8b", "ngram", 0),
        # A tied embedding is the head too.
        ("sglang", "llama-3.2-1b", "eagle1", 128_256 * 2048 * 2),
        ("vllm", "qwen3.6-27b", "mtp", 0),
    ],
)
def test_the_drafters_tables_take_memory_while_the_pool_is_sized(
    engine: str, model: str, method: str, tables: int
) -> None:
    for gpu, ranks in (("h100", 1), ("h100x2", 2)):
        found = estimate(
            kvcalc.load_model(model), context_tokens=8192, engine=engine, devices=find_devices(gpu),
            tensor_parallel_size=ranks, speculative=Speculation(method, 3, 2.0),
        )  # fmt: skip
        sizes = [line["bytes"] for line in found["fit"]["lines"] if line["name"].startswith("the drafter's tables")]
        assert sum(sizes) == tables // ranks


def test_an_eagle_head_of_the_models_vocabulary_frees_its_head_too() -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "architectures": ["LlamaForCausalLMEagle3"],
    }  # fmt: skip
    rules, table = load_engine("sglang", kvcalc.load_model("llama-3.1-8b")), 128_256 * 4096 * 2
    for more, tables in (({}, 2), ({"draft_vocab_size": 32000}, 1)):
        ((_, size),) = rules.draft_tables("eagle", kvcalc.read_config({**config, **more}, "test", "test"), 1)
        assert size == tables * table
