"""Families whose layers differ: window patterns, shared caches, chunks, indexers, states. Bytes computed by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcalc.errors import ModelError, UsageError
from kvcalc.model.caches import (
    ChunkedAttention,
    FullAttention,
    IndexerKeys,
    LatentAttention,
    RecurrentState,
    SlidingWindowAttention,
)
from kvcalc.model.hf_config import read_config
from tests.documents import estimate

SMALL = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
FULL, SLIDING = FullAttention(2, 8, 8), SlidingWindowAttention(5, 2, 8, 8)


def layers(model_type: str, **config: Any) -> list[Any]:
    """Return the caches of every layer, in order."""
    spec = read_config({"model_type": model_type, **SMALL, **config}, "test", "test")
    return [group.caches for group in spec.layers for _ in range(group.num_layers)]


def letters(model_type: str, **config: Any) -> str:
    """Return one letter per layer: f for full attention, s for a sliding window, - if the layer keeps nothing."""
    marks = {FullAttention: "f", SlidingWindowAttention: "s"}
    return "".join(marks[type(kept[0])] if kept else "-" for kept in layers(model_type, **config))


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("gemma2", {}, "sfsfsf"),
        ("gemma3_text", {}, "sssssf"),
        ("gemma3_text", {"sliding_window_pattern": 3}, "ssfssf"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "fffffs"),
        ("gemma3n_text", {"num_hidden_layers": 10, "num_kv_shared_layers": 4}, "ssssfs----"),
        ("gemma4_text", {"num_hidden_layers": 8}, "sssssfsf"),
        ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 6}, "sssssf------"),
        ("gpt_oss", {}, "sfsfsf"),
        ("olmo3", {}, "sssfss"),
        ("cohere2", {}, "sssfss"),
        ("qwen2", {}, "ffffff"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, "ffffss"),
        ("qwen2", {"use_sliding_window": True}, "ffffff"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, "ssssss"),
        ("qwen3_moe", {"use_sliding_window": True}, "ssssss"),
        ("qwen3_moe", {}, "ffffff"),
        ("mixtral", {}, "ssssss"),
        ("mixtral", {"sliding_window": None}, "ffffff"),
        ("phi3", {}, "ssssss"),
    ],
)
def test_which_layers_have_a_window(model_type: str, config: dict[str, Any], expected: str) -> None:
    assert letters(model_type, **{"sliding_window": 5, **config}) == expected


@pytest.mark.parametrize("model_type", ["llama", "cohere", "gemma", "glm4_moe", "minimax_m2", "gpt_neox"])
@pytest.mark.parametrize(
    "foreign",
    [
        {"sliding_window": 5},
        {"use_sliding_window": True},
        {"layer_types": ["sliding_attention"] * 6},
        {"v_head_dim": 4},
    ],
    ids=str,
)
def test_a_window_where_the_family_has_none_is_refused(model_type: str, foreign: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(foreign))):
        layers(model_type, **foreign)


@pytest.mark.parametrize(
    "bad", [["full_attention"] * 5, ["full_attention"] * 5 + ["dense"], "full_attention", {"a": 1}]
)
def test_a_list_of_kinds_must_name_every_layer(bad: Any) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        layers("gemma3_text", sliding_window=5, layer_types=bad)


def test_gemma_4s_layers_that_see_all_are_wider_and_may_have_fewer_heads() -> None:
    wide = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert layers("gemma4_text", sliding_window=5, **wide)[-1] == (FullAttention(2, 16, 16),)
    assert layers("gemma4_text", sliding_window=5, attention_k_eq_v=True, **wide)[-1] == (FullAttention(1, 16, 16),)
    assert layers("gemma4_text", sliding_window=5, **wide)[0] == (SLIDING,)


def test_llama_4_chunks_three_layers_of_four() -> None:
    chunked = (ChunkedAttention(5, 2, 8, 8),)
    assert layers("llama4_text", attention_chunk_size=5) == [chunked, chunked, chunked, (FULL,), chunked, chunked]
    assert layers("llama4_text", attention_chunk_size=5, no_rope_layers=[1, 0, 1, 0, 1, 0])[1] == (FULL,)
    assert layers("llama4_text", attention_chunk_size=None) == [(FULL,)] * 6


MLA = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def test_indexers_stand_beside_the_latent_in_all_or_some_layers() -> None:
    assert layers("deepseek_v3", **MLA) == [(LatentAttention(16, 4),)] * 6
    # With indexers, a step reads at most 2,048 tokens, also in layers that reuse the choice of another layer.
    sparse = LatentAttention(16, 4, most_read_tokens=2048)
    bare, indexed = (sparse,), (sparse, IndexerKeys(128))
    assert layers("deepseek_v32", **MLA) == [indexed] * 6
    assert layers("glm_moe_dsa", **MLA) == [indexed] * 6
    assert layers("glm_moe_dsa", **MLA, index_topk_pattern="FSFFSS") == [indexed, bare, indexed, indexed, bare, bare]
    by_step = layers("glm_moe_dsa", **MLA, index_topk_freq=2, index_skip_topk_offset=3)
    assert by_step == [indexed, indexed, indexed, bare, indexed, bare]


def test_longcat_has_two_attention_layers_a_block() -> None:
    config = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"}
    spec = read_config({"model_type": "longcat_flash", **config, **MLA, "num_layers": 3}, "test", "test")
    assert spec.num_layers == 6


DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
STATE = RecurrentState(2 * 2 * 8 + 4 * 4, 4, 4 * 8 * 4, num_heads=2)


def test_delta_nets_keep_a_state_in_three_layers_of_four() -> None:
    assert layers("qwen3_next", **DELTA) == [(STATE,), (STATE,), (STATE,), (FULL,), (STATE,), (STATE,)]


def test_a_state_does_not_grow_nor_follow_the_caches_dtype() -> None:
    spec = read_config({"model_type": "qwen3_next", **SMALL, **DELTA}, "test", "test")
    stored, held = 5 * (48 * 3 * 2 + 128 * 4), 5 * (48 * 4 * 2 + 128 * 4)

    def cache(tokens: int, **options: Any) -> dict[str, Any]:
        answer: dict[str, Any] = estimate(spec, context_tokens=tokens, **options)["kv_cache"]
        return answer

    for tokens in (1, 1000):
        per_token = 2 * 2 * 8 * 2
        assert cache(tokens)["total_bytes"] == stored + tokens * per_token
        assert cache(tokens, engine="transformers")["total_bytes"] == held + tokens * per_token
        assert cache(tokens, kv_dtype="fp8")["total_bytes"] == stored + tokens * per_token // 2
        assert cache(tokens)["fixed_bytes_per_sequence"] == stored
    # The inputs of the convolution are in the model's dtype, and the recurrence is in fp32.
    assert cache(1, dtype="fp32")["total_bytes"] == 5 * (48 * 3 * 4 + 128 * 4) + 2 * 2 * 8 * 4


def test_a_state_is_split_evenly_or_not_at_all() -> None:
    spec = read_config({"model_type": "qwen3_next", **SMALL, **DELTA}, "test", "test")
    answer = estimate(spec, context_tokens=10, tensor_parallel_size=2)["kv_cache"]
    assert answer["bytes_per_device"] * 2 == answer["total_bytes"]
    odd = {**DELTA, "linear_num_value_heads": 3, "linear_value_head_dim": 5, "linear_key_head_dim": 5}
    with pytest.raises(UsageError, match="recurrent state"):
        estimate(read_config({"model_type": "qwen3_next", **SMALL, **odd}, "x", "x"), tensor_parallel_size=2)


NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}


def test_nemotron_names_every_layer() -> None:
    state = (RecurrentState(4 * 16 + 2 * 2 * 8, 4, 4 * 16 * 8, num_heads=4, num_groups=2, group_channels=32),)
    assert layers("nemotron_h", **NEMOTRON, hybrid_override_pattern="M-*EM*") == [
        state,
        (),
        (FULL,),
        (),
        state,
        (FULL,),
    ]
    block_types = ["mamba", "mlp", "attention", "moe", "mamba", "attention"]
    listed = {k: v for k, v in SMALL.items() if k != "num_hidden_layers"}
    spec = read_config({"model_type": "nemotron_h", **listed, **NEMOTRON, "layers_block_type": block_types}, "x", "x")
    assert [group.caches for group in spec.layers] == [state, (), (FULL,), (), state, (FULL,)]
    for bad in ("M-*EM", "M-*EMX", "", 3):
        with pytest.raises(ModelError, match="hybrid_override_pattern"):
            layers("nemotron_h", **NEMOTRON, hybrid_override_pattern=bad)


def test_hybrids_are_called_so_and_their_variants_keep_the_states(kvcalc: Any) -> None:
    spec = read_config({"model_type": "qwen3_next", **SMALL, **DELTA}, "test", "test")
    answer = estimate(spec, context_tokens=10)
    assert answer["model"]["attention"] == "hybrid"
    states = 5 * (48 * 3 * 2 + 128 * 4)
    totals = {v["attention"]: v["total_bytes"] - states for v in answer["variants"]}
    assert totals == {"mha": 2 * 4 * 8 * 10 * 2, "mqa": 2 * 8 * 10 * 2, "gqa": 2 * 2 * 8 * 10 * 2, "mla": 36 * 10 * 2}
    assert [v["own"] for v in answer["variants"]] == [False, False, True, False]


@pytest.mark.parametrize(("tokens", "expected"), [(8192, 1_107_296_256), (131_072, 11_173_625_856)])
def test_gemma_3_27b_whose_config_names_no_pattern(tokens: int, expected: int) -> None:
    """Dimensions of the published text_config of gemma-3-27b-it."""
    text = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "hidden_size": 5376,
        "head_dim": 128,
        "sliding_window": 1024,
    }
    spec = read_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}, "gemma-3-27b", "x")
    assert estimate(spec, context_tokens=tokens)["kv_cache"]["total_bytes"] == expected


def test_gpt_oss_120b() -> None:
    """Dimensions of the published config of gpt-oss-120b."""
    config = {
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 2880,
        "head_dim": 64,
    }
    spec = read_config({"model_type": "gpt_oss", **config, "sliding_window": 128}, "gpt-oss-120b", "x")
    assert estimate(spec, context_tokens=8192)["kv_cache"]["total_bytes"] == 306_708_480


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text", **SMALL, "attention_chunk_size": 5},
        {"model_type": "qwen3_next", **SMALL, **DELTA},
        {"model_type": "gemma4_text", **SMALL, "sliding_window": 5},
    ],
    ids=lambda config: config["model_type"],
)
def test_measure_holds_what_is_predicted_of_a_hybrid(
    kvcalc: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    from tests.measure.quick import quicken

    quicken(monkeypatch)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = kvcalc("measure", path, "--context", "64", "--steps", "2", "--device", "cpu", "--json")
    assert result.status == 0, result.err
    (found,) = result.json["runs"]
    assert found["held_bytes"] == found["predicted_bytes"] > 0


def test_measure_refuses_sparse_attention_by_name(kvcalc: Any, tmp_path: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v32", **SMALL, **MLA}))
    result = kvcalc("measure", path, "--context", "64", "--steps", "2", "--device", "cpu")
    assert (result.status, result.out) == (3, "")
    assert "indexer keys" in result.err


def test_embeddinggemma_is_an_encoder_with_half_the_window() -> None:
    """Gemma3TextConfig, Transformers 5.23.0: a window of 512 is 257 tokens with use_bidirectional_attention.

    After 2,048 tokens the formula has 20 layers of 257 tokens and 4 of 2,048, with one head of 256 in 16 bits. Engines
    keep nothing after the forward pass.
    """
    config = {
        "model_type": "gemma3_text", "num_hidden_layers": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
        "hidden_size": 768, "intermediate_size": 1152, "head_dim": 256, "sliding_window": 512,
        "use_bidirectional_attention": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    spec = read_config(config, "embeddinggemma", "x")
    assert spec.is_encoder
    found = {
        engine: estimate(spec, context_tokens=2048, engine=engine)["kv_cache"]["total_bytes"]
        for engine in ("logical", "sglang", "vllm", "llama.cpp", "tensorrt-llm")
    }
    assert found == {
        "logical": (20 * 257 + 4 * 2048) * 2 * 256 * 2, "sglang": 0, "vllm": 0, "llama.cpp": 0, "tensorrt-llm": 0
    }  # fmt: skip
    assert not read_config({**config, "use_bidirectional_attention": False}, "gemma-3", "x").is_encoder
