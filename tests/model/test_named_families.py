"""Decoders and encoders with their own key names: which keys are read, which defaults apply, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc as library
from kvcalc.errors import ModelError
from kvcalc.model.caches import FullAttention, IndexerKeys, LatentAttention, SlidingWindowAttention
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import all_caches

PLAIN = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 512}
GPT = {"n_layer": 3, "n_head": 8, "n_embd": 512}
MHA = FullAttention(8, 64, 64)
ATTENTION = {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False, "window_length": None}


def layers(model_type: str, config: dict[str, Any], **changes: Any) -> list[Any]:
    """Return the caches of every layer, in order."""
    spec = read_config({"model_type": model_type, **config, **changes}, "test", "a test")
    return [group.caches for group in spec.layers for _ in range(group.num_layers)]


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("gptj", GPT, MHA),
        ("codegen", GPT, MHA),
        ("ctrl", GPT, MHA),
        ("jais", GPT, MHA),
        ("gpt_bigcode", GPT, FullAttention(1, 64, 64)),
        ("gpt_bigcode", {**GPT, "multi_query": False}, MHA),
        ("xglm", {"num_layers": 3, "attention_heads": 8, "d_model": 512}, MHA),
        ("qwen", {**PLAIN, "kv_channels": 64}, MHA),
        ("qwen", GPT, MHA),
        ("exaone", {**PLAIN, "num_layers": 3, "num_key_value_heads": 2}, FullAttention(2, 64, 64)),
        ("telechat", {"n_layer": 3, "n_head": 8, "hidden_size": 512}, MHA),
        (
            "chatglm",
            {"num_layers": 3, "num_attention_heads": 8, "hidden_size": 512, "multi_query_attention": True,
             "multi_query_group_num": 2},
            FullAttention(2, 64, 64),
        ),
        ("chatglm", {"num_layers": 3, "num_attention_heads": 8, "hidden_size": 512, "kv_channels": 64}, MHA),
        ("mpt", {"n_layers": 3, "n_heads": 8, "d_model": 512}, MHA),
        (
            "dbrx",
            {"n_layers": 3, "n_heads": 8, "d_model": 512, "attn_config": {"kv_n_heads": 2}},
            FullAttention(2, 64, 64),
        ),
        ("dbrx", {"n_layers": 3, "n_heads": 8, "d_model": 512}, FullAttention(1, 64, 64)),
        ("jetmoe", {"num_hidden_layers": 3, "hidden_size": 512}, FullAttention(16, 128, 128)),
        ("internlm2", {**PLAIN, "num_key_value_heads": 2}, FullAttention(2, 64, 64)),
        ("baichuan", PLAIN, MHA),
        ("opt", PLAIN, MHA),
        ("nanochat", PLAIN, MHA),
        ("internlm3", PLAIN, FullAttention(2, 128, 128)),
        ("step3p5", PLAIN, FullAttention(8, 128, 128)),
        ("step3p5", {**PLAIN, "num_attention_groups": 2}, FullAttention(2, 128, 128)),
        ("git", PLAIN, MHA),
    ],
)  # fmt: skip
def test_the_plain_facts_under_their_own_names(model_type: str, config: dict[str, Any], expected: Any) -> None:
    assert layers(model_type, config) == [(expected,)] * 3


def test_jetmoe_has_a_set_of_query_heads_for_each_expert_of_a_token() -> None:
    spec = read_config({"model_type": "jetmoe", "num_hidden_layers": 1, "hidden_size": 512}, "x", "x")
    assert (spec.attention.num_heads, spec.attention.num_kv_heads) == (32, 16)


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("baichuan", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("opt", {"head_dim": 32}, "head_dim"),
        ("orion", {}, "num_key_value_heads"),
        ("qwen", {"kv_channels": 32}, "kv_channels"),
        ("qwen", {"use_cache_quantization": True}, "8-bit"),
        ("qwen", {"multi_query_group_num": 2}, "multi_query_group_num"),
        ("qwen", {"num_attention_heads": 7}, "does not divide"),
        ("exaone", {"num_layers": 3, "head_dim": 32}, "head_dim"),
        ("chatglm", {"num_layers": 3, "multi_query_attention": True}, "multi_query_group_num"),
        ("chatglm", {"num_layers": 3, "pre_seq_len": 128}, "prefix"),
        ("chatglm", {"num_layers": 3, "num_key_value_heads": 2}, "num_key_value_heads"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense", {"attention_head_dim": 32}, "attention_head_dim"),
        ("llama", {"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config"),
        ("llama", {"attention_head_dim": 64}, "attention_head_dim"),
        ("llama", {"num_key_value_heads_per_layer": [1, 2, 4]}, "num_key_value_heads_per_layer"),
        ("albert", {"is_decoder": True}, "is not a decoder"),
        ("roberta", {"is_decoder": True, "add_cross_attention": True}, "cross"),
        ("git", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_what_would_change_the_cache_is_refused_by_name(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        layers(model_type, PLAIN, **changes)


@pytest.mark.parametrize(
    "attn_config",
    [{"attn_type": "multiquery_attention"}, {"kv_n_heads": 2}, {"sliding_window_size": 64}, "torch"],
    ids=str,
)
def test_mpt_knows_plain_heads_alone(attn_config: object) -> None:
    with pytest.raises(ModelError, match="attn_config"):
        layers("mpt", {"n_layers": 3, "n_heads": 8, "d_model": 512}, attn_config=attn_config)


def test_gpt_neo_takes_turns_and_transformers_keeps_all() -> None:
    config = {"num_layers": 4, "num_heads": 8, "hidden_size": 512, "attention_types": [[["global", "local"], 2]]}
    full, local = (MHA,), (SlidingWindowAttention(256, 8, 64, 64),)
    assert layers("gpt_neo", config) == [full, local, full, local]
    assert layers("gpt_neo", config, window_size=5)[1] == (SlidingWindowAttention(5, 8, 64, 64),)
    spec = read_config({"model_type": "gpt_neo", **config}, "x", "x")
    row = 2 * 8 * 64 * 2
    logical = library.estimate(spec, context_tokens=1000, dtype="bf16")["kv_cache"]["total_bytes"]
    assert logical == 2 * (1000 + 256) * row
    held = library.estimate(spec, context_tokens=1000, dtype="bf16", engine="transformers")["kv_cache"]["total_bytes"]
    assert held == 4 * 1000 * row


@pytest.mark.parametrize(
    "wrong",
    [
        {"attention_types": [[["global", "local"], 3]]},
        {"attention_types": [[["global", "near"], 2]]},
        {"attention_types": [["global", 2, 3]]},
        {"attention_types": [[["global", "local"], -1]]},
        {"attention_types": "global"},
        {"attention_types": [[["global", "local"], 2]], "attention_layers": ["local"] * 4},
        {},
    ],
    ids=str,
)
def test_gpt_neo_must_name_every_layer(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="attention_"):
        layers("gpt_neo", {"num_layers": 4, "num_heads": 8, "hidden_size": 512}, **wrong)


def test_modernbert_decodes_with_half_of_its_local_attention() -> None:
    full, local = (MHA,), (SlidingWindowAttention(64, 8, 64, 64),)
    assert layers("modernbert-decoder", PLAIN) == [full, local, local]
    assert layers("modernbert-decoder", PLAIN, local_attention=10)[1] == (SlidingWindowAttention(5, 8, 64, 64),)
    with pytest.raises(ModelError, match="sliding_window is not half"):
        layers("modernbert-decoder", PLAIN, sliding_window=128)


def block(**attention: Any) -> dict[str, Any]:
    return {"attention": {**ATTENTION, **attention}, "ffn": {"no_op": False}}


def test_searched_layers_keep_what_each_block_says() -> None:
    blocks = [block(), block(no_op=True, n_heads_in_group=None), block(n_heads_in_group=8)]
    assert layers("nemotron-nas", PLAIN, block_configs=blocks, num_key_value_heads=None) == [
        (FullAttention(2, 64, 64),),
        (),
        (FullAttention(1, 64, 64),),
    ]
    assert layers("nemotron-nas", PLAIN, block_configs=[block(replace_with_linear=True)] * 3) == [()] * 3
    assert layers("deci", PLAIN, num_key_value_heads_per_layer=[4, 2, 1]) == [
        (FullAttention(heads, 64, 64),) for heads in (4, 2, 1)
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"block_configs": [block()] * 2},
        {"block_configs": [block()] * 2 + [{}]},
        {"block_configs": [block(window_length=64)] * 3},
        {"block_configs": [block(sparsify=["q"])] * 3},
        {"block_configs": [block(n_heads_in_group=3)] * 3},
        {"block_configs": [block(n_heads_in_group=None)] * 3},
        {"num_key_value_heads_per_layer": [1, 2, None]},
    ],
    ids=str,
)
def test_a_searched_layer_nobody_can_count_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        layers("nemotron-nas", PLAIN, **wrong)


@pytest.mark.parametrize(
    ("model_type", "key", "windows"),
    [("nanbeige", "num_loops", [None]), ("ouro", "total_ut_steps", [None]), ("iquestloopcoder", "loop_num", [64])],
)
def test_a_looped_decoder_keeps_every_pass_of_a_layer(model_type: str, key: str, windows: list[int | None]) -> None:
    """As vLLM 0.33.0 and SGLang 0.5.23 number their layers: loop x layers + layer."""
    config = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = [getattr(kept[0], "window", None) for kept in layers(model_type, config, **{key: 3})]
    assert found == [None] * 3 + windows * 6
    with pytest.raises(ModelError, match=key):
        layers(model_type, config)


def test_openelm_lists_its_heads_by_layer() -> None:
    config = {
        "num_transformer_layers": 3, "head_dim": 64, "model_dim": 512, "num_query_heads": [4, 8, 8],
        "num_kv_heads": [1, 2, 2],
    }  # fmt: skip
    assert [kept[0].num_kv_heads for kept in layers("openelm", config)] == [1, 2, 2]
    with pytest.raises(ModelError, match="num_kv_heads must be a list of 3"):
        layers("openelm", config, num_kv_heads=[1, 2])
    with pytest.raises(ModelError, match="does not divide"):
        layers("openelm", config, num_kv_heads=[3, 2, 2])


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("albert", PLAIN),
        ("deberta-v2", PLAIN),
        ("distilbert", {"n_layers": 3, "n_heads": 8, "dim": 512}),
        ("mpnet", PLAIN),
        ("nomic_bert", GPT),
        ("roberta", PLAIN),
        ("xlm-roberta", PLAIN),
    ],
)
def test_encoders_are_counted_by_the_formula_and_kept_by_no_engine(model_type: str, config: dict[str, Any]) -> None:
    spec = read_config({"model_type": model_type, **config}, "x", "x")
    assert spec.is_encoder
    # 3 layers x 2 x 8 heads x 64 x 10 tokens x 2 bytes.
    assert library.estimate(spec, context_tokens=10, dtype="bf16")["kv_cache"]["total_bytes"] == 61_440
    assert library.estimate(spec, context_tokens=10, engine="transformers")["kv_cache"]["total_bytes"] == 0


def test_a_roberta_that_decodes_is_no_encoder() -> None:
    assert not read_config({"model_type": "roberta", **PLAIN, "is_decoder": True}, "x", "x").is_encoder
    assert not read_config({"model_type": "git", **PLAIN}, "x", "x").is_encoder


@pytest.mark.parametrize(("model_type", "latent"), [("axk1", (512, 64)), ("mistral4", (256, 64)), ("youtu", (512, 64))])
def test_latents_a_config_may_leave_out(model_type: str, latent: tuple[int, int]) -> None:
    assert layers(model_type, PLAIN) == [(LatentAttention(*latent),)] * 3


def test_indexers_of_deepseek_s_kin() -> None:
    latent, keys = LatentAttention(128, 32, most_read_tokens=2048), IndexerKeys(128)
    assert layers("axk2", PLAIN) == [(latent, keys)] * 3
    six = {**PLAIN, "num_hidden_layers": 6}
    assert [len(kept) for kept in layers("hy_v4", six)] == [2, 2, 1, 1, 1, 2]
    assert [len(kept) for kept in layers("hy_v4", six, indexer_types=["shared"] * 5 + ["full"])] == [1, 1, 1, 1, 1, 2]
    with pytest.raises(ModelError, match="layer_types"):
        layers("axk2", PLAIN, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match="layer_types"):
        layers("axk1", PLAIN, layer_types=["sliding_attention"] * 3)
    with pytest.raises(ModelError, match="use_mla"):
        layers("axk1", PLAIN, use_mla=False)


def test_a_puzzle_model_has_the_caches_of_nemotron_h_and_no_counted_weights() -> None:
    """NemotronHPuzzleConfig, SGLang 0.5.23: each layer may have its own number of experts."""
    nemotron = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4, "hybrid_override_pattern": "ME*",
    }  # fmt: skip
    blocks: list[dict[str, object]] = [{"block_type": "mamba"}, {"n_routed_experts": 2}, {"block_type": "attention"}]
    own, puzzle = {"model_type": "nemotron_h", **nemotron}, {"model_type": "nemotron_h_puzzle", **nemotron}
    found = read_config({**puzzle, "block_configs": blocks}, "x", "x")
    assert all_caches(found) == all_caches(read_config(own, "x", "x"))
    assert found.around is None
    with pytest.raises(ModelError, match="num_key_value_heads"):
        read_config({**puzzle, "block_configs": [*blocks[:2], {"num_key_value_heads": 1}]}, "x", "x")


def test_an_encoder_of_modernbert_sees_its_window_on_both_sides() -> None:
    encoder = read_config({"model_type": "modernbert", **PLAIN}, "x", "x")
    assert encoder.is_encoder
    assert [cache.window for cache in all_caches(encoder) if isinstance(cache, SlidingWindowAttention)] == [129]
