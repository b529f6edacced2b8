"""llama.cpp's cells, types, windows and states, computed by hand. A row of `plain()` has 128 elements of K and of V."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines.llama_cpp.engine import LlamaCpp
from kvcalc.errors import ModelError, UsageError
from tests.documents import estimate
from tests.engines.models import ask, gated_delta, gpt_oss, latent, lines, plain, sparse, total

# 2 layers x (128 + 128) elements.
ELEMENTS = 512
# One slot. Without this, llama-server has four.
ONE = {"parallel": "1"}


def test_a_context_is_rounded_up_to_256_cells() -> None:
    assert total(plain(), "llama.cpp", 256) == 256 * ELEMENTS * 2
    assert total(plain(), "llama.cpp", 257) == 512 * ELEMENTS * 2
    assert lines(plain(), "llama.cpp", 257) == {
        "stored": 257 * ELEMENTS * 2, "cells rounded up": 255 * ELEMENTS * 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("k", "v", "row_bytes"),
    # Bytes of 128 elements of K and V. Bytes per 32 elements: q8_0 34, q4_0 and iq4_nl 18, q4_1 20, q5_0 22, q5_1 24.
    [("f32", "f16", 512 + 256), ("q8_0", "q8_0", 136 + 136), ("q8_0", "f16", 136 + 256), ("q4_0", "q4_1", 72 + 80),
     ("q5_0", "q5_1", 88 + 96), ("iq4_nl", "bf16", 72 + 256)],
)  # fmt: skip
def test_k_and_v_have_types_of_their_own(k: str, v: str, row_bytes: int) -> None:
    settings = {"cache-type-k": k, "cache-type-v": v}
    answer = ask(plain(), "llama.cpp", 1024, settings=settings)["kv_cache"]
    assert answer["total_bytes"] == answer["stored_bytes"] == 1024 * 2 * row_bytes
    assert answer["formulas"][0]["bytes"] == 1024 * 2 * row_bytes


def test_the_default_is_f16_and_says_so() -> None:
    answer = ask(plain(torch_dtype="float32"), "llama.cpp", 256)
    assert answer["kv_cache"]["dtype"] == "fp16"
    assert "f16" in answer["engine"]["kv_dtype_reason"]
    explicit = ask(plain(), "llama.cpp", 256, kv_dtype="q8_0")
    assert (explicit["kv_cache"]["dtype"], explicit["engine"]["kv_dtype_reason"]) == ("q8_0", None)


def test_every_slot_has_its_own_stream_or_all_share_one() -> None:
    own = ask(plain(), "llama.cpp", 300, 3, settings=ONE)
    assert own["kv_cache"]["total_bytes"] == 3 * 512 * ELEMENTS * 2
    assert (own["engine"]["n_ctx"], own["engine"]["n_ctx_seq"], own["engine"]["n_stream"]) == (1536, 512, 3)
    # 900 tokens in one stream take 1,024 cells.
    assert total(plain(), "llama.cpp", 300, 3, settings={"kv-unified": ""}) == 1024 * ELEMENTS * 2
    assert lines(plain(), "llama.cpp", 256, 1, settings={"parallel": "4"}) == {
        "stored": 256 * ELEMENTS * 2, "slots beyond the batch": 3 * 256 * ELEMENTS * 2,
    }  # fmt: skip


def test_llama_server_starts_four_slots_that_share_the_context() -> None:
    """The default since pull request 16736 (tools/server/server.cpp)."""
    found = ask(plain(), "llama.cpp", 300)["engine"]
    assert (found["n_seq_max"], found["n_stream"], found["kv_unified"], found["n_ctx_seq"]) == (4, 1, True, 512)
    # 900 tokens in one stream take 1,024 cells, and no slot takes more for itself.
    assert total(plain(), "llama.cpp", 300, 3) == 1024 * ELEMENTS * 2
    assert ask(plain(), "llama.cpp", 300)["warnings"] == []
    # A batch of five needs --parallel 5, and then every slot has its own stream.
    more = ask(plain(), "llama.cpp", 300, 5)
    assert (more["engine"]["n_seq_max"], more["engine"]["n_stream"], more["engine"]["kv_unified"]) == (5, 5, False)
    assert more["kv_cache"]["total_bytes"] == 5 * 512 * ELEMENTS * 2


def test_every_slot_keeps_a_window_and_a_state() -> None:
    # 4 x 128 + 512 tokens take 1,024 cells, and with one slot 768.
    full, more = 18 * 32768 * 2048, 18 * 256 * 2048
    assert total(gpt_oss(36), "llama.cpp", 32768) == full + 18 * 1024 * 2048
    assert lines(gpt_oss(36), "llama.cpp", 32768)["slots beyond the batch"] == more
    assert lines(gpt_oss(36), "llama.cpp", 32768, 2)["slots beyond the batch"] == more
    assert "slots beyond the batch" not in lines(gpt_oss(36), "llama.cpp", 32768, 4)
    # Four states. Qwen3.5-35B-A3B prints 251.25 MiB for 4 cells.
    state = 30 * (8192 * 3 + 524288) * 4
    assert 4 * state == int(251.25 * 2**20)
    assert total(gated_delta(), "llama.cpp", 256, 2) == 2 * 10 * 256 * 1024 * 2 + 4 * state
    assert lines(gated_delta(), "llama.cpp", 256)["slots beyond the batch"] == 3 * state


@pytest.mark.parametrize(
    ("config", "kept"), [(gpt_oss(), "a window"), (gated_delta(), "a state"), (plain(), None), (latent(), None)]
)
def test_the_answer_says_what_idle_slots_keep_and_how_to_change_it(config: dict[str, object], kept: str | None) -> None:
    said = [note["text"] for note in ask(config, "llama.cpp", 8192)["warnings"] if note["code"] == "slots"]
    text = f"llama-server starts 4 slots, and each keeps {kept} of its own; --parallel 1 starts one"
    assert said == ([] if kept is None else [text])
    assert all(note["code"] != "slots" for note in ask(config, "llama.cpp", 8192, settings=ONE)["warnings"])
    assert ask(config, "llama.cpp", 8192)["engine"]["program"] == "llama-server"
    # Windows that are kept whole share the cells.
    whole = ask(config, "llama.cpp", 8192, settings={"swa-full": True})["warnings"]
    assert any(note["code"] == "slots" for note in whole) is (kept == "a state")


@pytest.mark.parametrize(
    ("engine", "settings", "slots"),
    [("llama.cpp", {}, 4), ("llama.cpp@b7079", {}, 4), ("llama.cpp@2026-05-20", {}, 4), ("llama.cpp@b6097", {}, 1),
     ("llama.cpp@2025-08-10", {}, 1), ("llama.cpp", {"before-pull": "16736"}, 1),
     ("llama.cpp", {"before-pull": "16812"}, 1), ("llama.cpp", {"before-pull": "19067"}, 4),
     ("llama.cpp@b6097", {"parallel": "2"}, 2)],
)  # fmt: skip
def test_older_builds_start_one_slot(engine: str, settings: dict[str, str], slots: int) -> None:
    found = ask(gpt_oss(), engine, 32768, settings=settings)
    assert found["engine"]["n_seq_max"] == slots
    assert any(note["code"] == "slots" for note in found["warnings"]) == (slots == 4)


def test_windows_keep_a_window_and_a_step() -> None:
    # 18 of 36 layers keep 128 + 512 = 640 tokens in 768 cells; a row is 8 x 64 x 2 elements of 2 bytes.
    full, window = 18 * 32768 * 2048, 18 * 768 * 2048
    assert total(gpt_oss(36), "llama.cpp", 32768, settings=ONE) == full + window
    assert total(gpt_oss(36), "llama.cpp", 32768, settings={**ONE, "swa-full": ""}) == 2 * full
    assert total(gpt_oss(36), "llama.cpp", 32768, settings={**ONE, "ubatch-size": "2048"}) == full + 18 * 2304 * 2048
    # A shorter context keeps all its tokens.
    assert total(gpt_oss(36), "llama.cpp", 512, settings=ONE) == 36 * 512 * 2048
    # One stream for 4 slots: 4 windows and one step take 1,024 cells.
    unified = {"kv-unified": "", "parallel": "4"}
    assert total(gpt_oss(36), "llama.cpp", 32768, settings=unified) == full + 18 * 1024 * 2048


def test_a_window_llama_cpp_does_not_know_is_kept_whole() -> None:
    spec = kvcalc.load_model("mistral-7b-v0.1")
    answer = estimate(spec, context_tokens=8192, engine="llama.cpp")
    assert answer["kv_cache"]["total_bytes"] == 32 * 8192 * 2 * 8 * 128 * 2
    assert answer["engine"]["pool_lines"][1] == {"name": "windows kept whole", "bytes": 32 * 4096 * 2 * 8 * 128 * 2}


def test_v_is_padded_to_the_widest_layer_without_flash_attention() -> None:
    # Gemma 4's windowed layers have 4 heads of 16, and the last layer has 2 of 24: V rows of 64 and 48 elements.
    config = {
        "model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "head_dim": 16, "global_head_dim": 24,
        "hidden_size": 64, "sliding_window": 32, "num_kv_shared_layers": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    plain_bytes = 5 * 768 * 128 * 2 + 1024 * 96 * 2
    assert total(config, "llama.cpp", 1024) == plain_bytes
    assert total(config, "llama.cpp", 1024, settings={"flash-attn": "off"}) == plain_bytes + 1024 * 16 * 2


def test_mla_keeps_one_row_and_sparse_attention_a_second_cache() -> None:
    assert total(latent(), "llama.cpp", 256) == 3 * 256 * 576 * 2
    assert total(sparse(), "llama.cpp", 256) == 3 * 256 * (576 + 128) * 2
    # A file without MLA's keys expands the heads: K of 192 and V of 128 in each of 16 heads.
    what_if = kvcalc.WhatIf("mha")
    assert total(latent(), "llama.cpp", 256, what_if=what_if) == 3 * 256 * 16 * (192 + 128) * 2


def test_older_builds_keep_what_pull_requests_took_away() -> None:
    # A second copy of the latent as V. Before April 2025, K of 192 and V of 128 in each of 16 heads.
    assert total(latent(), "llama.cpp", 256, settings={"before-pull": "19067"}) == 3 * 256 * (576 + 512) * 2
    assert total(latent(), "llama.cpp", 256, settings={"before-pull": "12801"}) == 3 * 256 * 16 * (192 + 128) * 2
    types = {"cache-type-k": "q8_0", "before-pull": "19067"}
    assert total(latent(), "llama.cpp", 256, settings=types) == 3 * 256 * (18 * 34 + 512 * 2)
    # Cells are rounded up to 32 without flash attention, and to 256 with it.
    older = {"before-pull": "16812"}
    assert total(plain(), "llama.cpp", 1001, settings=older) == 1024 * ELEMENTS * 2
    assert total(plain(), "llama.cpp", 900, settings=older) == 928 * ELEMENTS * 2
    assert total(plain(), "llama.cpp", 900, settings={**older, "flash-attn": "on"}) == 1024 * ELEMENTS * 2
    # Windows keep all tokens, and all slots share one stream: 200 tokens take 224 cells.
    oldest = {"before-pull": "13194"}
    assert total(gpt_oss(36), "llama.cpp", 32768, settings=oldest) == 36 * 32768 * 2048
    assert total(plain(), "llama.cpp", 100, 2, settings=oldest) == 224 * ELEMENTS * 2
    with pytest.raises(UsageError, match="no known change of memory in this pull"):
        ask(plain(), "llama.cpp", 256, settings={"before-pull": "1"})
    with pytest.raises(ModelError, match="sparse attention in older builds"):
        ask(sparse(), "llama.cpp", 256, settings={"before-pull": "19067"})


def test_states_are_in_fp32_one_for_each_slot() -> None:
    # 30 layers x (8,192 channels x 3 + 32 heads x 128 x 128) x 4 bytes = 62.8125 MiB; 10 x 256 tokens x 1,024 x 2.
    state, attention = 30 * (8192 * 3 + 524288) * 4, 10 * 256 * 1024 * 2
    assert state == int(62.8125 * 2**20)
    assert total(gated_delta(), "llama.cpp", 256, settings=ONE) == attention + state
    assert total(gated_delta(), "llama.cpp", 256, 3, settings=ONE) == 3 * (attention + state)


def test_states_are_kept_for_each_drafted_token_if_the_type_can_take_tokens_back() -> None:
    """llm_arch_supports_rs_rollback: Qwen3.5 can, Qwen3-Next restores a checkpoint."""
    state, drafts = 30 * (8192 * 3 + 524288) * 4, {**ONE, "draft-max": "2"}
    added = total(gated_delta(), "llama.cpp", 256, settings=drafts) - total(
        gated_delta(), "llama.cpp", 256, settings=ONE
    )
    assert added == 2 * state
    older = gated_delta(model_type="qwen3_next")
    assert total(older, "llama.cpp", 256, settings=drafts) == total(older, "llama.cpp", 256, settings=ONE)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_every_slot_keeps_states_for_drafts_in_fp32(batch: int) -> None:
    """Four slots, each with 256 cells, a state and two more for two drafted tokens. The model's states are in bf16."""
    state, cells = 30 * (8192 * 3 + 524288) * 4, 10 * 256 * 1024 * 2
    settings = {"draft-max": "2", "parallel": "4"}
    found = lines(gated_delta(), "llama.cpp", 256, batch, settings=settings)
    assert sum(found.values()) == 4 * (cells + 3 * state)
    assert found["states for prefixes and drafts"] == 4 * 2 * state
    assert found.get("slots beyond the batch", 0) == (4 - batch) * (cells + state)
    assert found["stored"] + found["states in fp32"] == batch * (cells + state)


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        (plain(), None, None), (plain(), "Q8_0", "gguf-q8_0"), (plain(), "bf16", "bf16"),
        (plain(), "mxfp4", "mxfp4"), (gpt_oss(), "mxfp4", "gguf-mxfp4"), (gpt_oss(), None, "gguf-mxfp4"),
        (gpt_oss(), "bf16", "bf16"),
    ],
)  # fmt: skip
def test_a_type_of_weights_is_that_of_a_gguf_file(
    config: dict[str, object], asked: str | None, dtype: str | None
) -> None:
    """MXFP4_MOE is for models with experts (ggml-org/gpt-oss-20b-GGUF), and the type of the file that was published."""
    if "gpt_oss" in str(config["model_type"]):
        config = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    spec = kvcalc.read_config(config, "test", "test")
    assert LlamaCpp.weight_dtype(spec, asked) == (dtype, None)


def test_shared_layers_keep_nothing() -> None:
    config = {
        "model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_size": 2048, "sliding_window": 512, "num_kv_shared_layers": 15,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    # 4 of 20 layers have full attention, 16 keep 512 + 512 cells. A row has 2 x 2 x 256 elements.
    assert total(config, "llama.cpp", 32768, settings=ONE) == (4 * 32768 + 16 * 1024) * 1024 * 2


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (plain(), {"kv_dtype": "fp8"}, UsageError, "not a cache type of llama.cpp"),
        (plain(), {"settings": {"cache-type-v": "q8_0", "flash-attn": "off"}}, UsageError, "--flash-attn on"),
        (plain(), {"settings": {"flash-attn": "maybe"}}, UsageError, "not a choice"),
        (plain(head_dim=80), {"kv_dtype": "q8_0"}, UsageError, "divide a head of 80"),
        (latent(), {"settings": {"cache-type-k": "q8_0"}}, UsageError, "K and V have the same type"),
        (plain(), {"tensor_parallel_size": 2}, UsageError, "tensor parallelism is not supported"),
        (latent(4, "longcat_flash", num_layers=2), {}, ModelError, "llama.cpp does not convert longcat_flash"),
    ],
    ids=["fp8", "V without flash attention", "flash-attn", "head", "MLA", "tp", "longcat"],
)  # fmt: skip
def test_what_llama_cpp_refuses(
    config: dict[str, object], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ask(config, "llama.cpp", 256, **options)


@pytest.mark.parametrize("settings", [{}, {"draft-max": "2"}, {"kv-unified": ""}])
@pytest.mark.parametrize("model", ["qwen3.5-27b", "nemotron-3-nano", "falcon-h1-7b", "jamba-1.5-mini"])
def test_the_lines_of_states_and_of_attention_add_up(model: str, settings: dict[str, str]) -> None:
    """Slots beyond the batch have cells of attention, of whichever layer comes first, and states."""
    asked: dict[str, Any] = {"engine": "llama.cpp", "context_tokens": 5000, "batch_size": 2}
    found = estimate(kvcalc.load_model(model), engine_settings={"parallel": "4", **settings}, **asked)
    lines = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
    assert sum(lines.values()) == found["kv_cache"]["bytes_per_device"]
    two = estimate(kvcalc.load_model(model), engine_settings={"parallel": "2", **settings}, **asked)
    if not settings:
        # Each of four slots has all that each of two has.
        assert lines["slots beyond the batch"] == two["kv_cache"]["bytes_per_device"]
