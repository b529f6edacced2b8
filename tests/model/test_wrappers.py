"""Models that wrap a language model: which config is read, what it inherits, and what it may leave out."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc as library
from kvcalc.errors import ModelError
from kvcalc.model.hf_config import is_remote, known_types, read_config
from kvcalc.model.wrappers import INNER_SIZES, REMOTE_WRAPPERS, WRAPPERS
from tests.model.test_hybrid_families import DELTA, MLA, SMALL
from tests.rows import every_row

# Keys that some inner families need in addition to the plain facts, or do not accept.
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "inkling2_loop_text": {"loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "jet_nemotron": {
        "layer_types": ["jet", "attn"] * 3,
        "efficient_attention_config": {"jet": {"num_heads": 2, "head_dim": 8, "expand_v": 2, "conv_size": 4}},
    },
    "kimi_linear": {**MLA, "layer_types": ["linear_attention", "full_attention"] * 3},
    "moss_vl_text": {"cross_attention_layers": [1]},
    "opt": {"num_key_value_heads": 4},
    "persimmon": {"num_key_value_heads": 4},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
}
# The whole config of an inner family with other names for the plain facts.
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "num_hidden_layers": 2}
WHOLE: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2},
    "deepseek_v41_text": {
        **SMALL, "num_key_value_heads": 1, "num_hidden_layers": 2, "head_dim": 8, "qk_rope_head_dim": 4,
        "sliding_window": 4, "compress_ratios": [2, 1], "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1],
        "index_head_dim": 8, "index_topk": 2,
    },
    "kosmos_2_text_model": {"embed_dim": 32, "layers": 2, "attention_heads": 4},
    "kosmos_2_5_text_model": {"embed_dim": 32, "layers": 2, "attention_heads": 4},
    "nemotron_h": {**SMALL, **MAMBA, "hybrid_override_pattern": "M*"},
    "step3_text": {**SMALL, "num_key_value_heads": 1},
    "step5": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"} | {"num_attention_groups": 2},
    "qwen4_exp_text": {
        **SMALL, **DELTA, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}  # fmt: skip


def wrapped(outer: str, inner: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """Return a config of type `outer` with `inner` as its language model."""
    for key in reversed(WRAPPERS[outer].keys):
        inner = {key: inner}
    return {"model_type": outer, **beside, **inner}


@every_row("outer", WRAPPERS)
def test_the_language_model_is_found_inside(outer: str) -> None:
    inner = WRAPPERS[outer].inner or "llama"
    text = WHOLE.get(inner) or {**SMALL, **OWN.get(inner, {})}
    text = dict(text)
    if WRAPPERS[outer].inner is None:
        text["model_type"] = inner
    spec = read_config(wrapped(outer, text, torch_dtype="float16", vision_config={"window_size": 7}), "x", "x")
    bare = read_config({"torch_dtype": "float16", **text, "model_type": inner}, "x", "x")
    # The wrapper's whole config stays, because it describes the towers.
    assert (spec.multimodal or {}).get("vision_config") == {"window_size": 7}
    assert spec._replace(in_transformers=True, multimodal=None) == bare._replace(in_transformers=True)
    assert spec.in_transformers is (outer not in REMOTE_WRAPPERS)
    assert spec.torch_dtype == "fp16"


def test_the_inner_config_says_of_which_type_it_is() -> None:
    spec = read_config(wrapped("llava_next", {**SMALL, "model_type": "mistral"}), "x", "x")
    assert spec.model_type == "mistral"
    assert spec.layers[0].caches[0].window == 4096
    assert read_config(wrapped("step3p7", {**SMALL, "model_type": "step_text"}), "x", "x").model_type == "step3p5"


def test_an_inner_type_must_be_stated_where_none_is_usual() -> None:
    with pytest.raises(ModelError, match=r"llm_config\.model_type is missing"):
        read_config(wrapped("internvl_chat", SMALL), "x", "x")


def test_a_wrapper_without_a_language_model_is_refused() -> None:
    with pytest.raises(ModelError, match="text_config is missing"):
        read_config({"model_type": "gemma3", "hidden_size": 32}, "x", "x")
    with pytest.raises(ModelError, match="text_config must be an object"):
        read_config({"model_type": "gemma3", "text_config": 3}, "x", "x")
    with pytest.raises(ModelError, match="text_config is missing"):
        read_config({"model_type": "qwen2_5_omni", "thinker_config": {}}, "x", "x")


def test_sizes_may_be_left_out_inside_a_wrapper_alone() -> None:
    spec = read_config({"model_type": "llava", "text_config": {"model_type": "llama"}}, "x", "x")
    assert spec.num_layers == 32
    # 32 layers x 2 x 32 heads x 128 x 4,096 tokens x 2 bytes.
    assert library.estimate(spec, context_tokens=4096, dtype="bf16")["kv_cache"]["total_bytes"] == 2_147_483_648
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_config({"model_type": "llama"}, "x", "x")


def test_every_inner_type_is_known_and_has_its_sizes() -> None:
    # Gated delta nets are published with their sizes, and so are models with their own code.
    for wrapper in WRAPPERS.values():
        assert wrapper.inner is None or wrapper.inner in known_types()
    assert set(INNER_SIZES) <= set(known_types())


@pytest.mark.parametrize("model_type", ["step3p7"])
def test_a_flat_config_is_counted_by_the_formula_alone(model_type: str) -> None:
    flat = read_config({"model_type": model_type, **SMALL}, "x", "x")
    assert flat.num_layers == 6
    with pytest.raises(ModelError, match=f"no class that reads a {model_type} config"):
        library.estimate(flat, engine="transformers")


@pytest.mark.parametrize("outer", ["qwen2_vl", "qwen2_5_vl"])
def test_qwen_vl_is_published_flat_and_transformers_reads_it_so(outer: str) -> None:
    flat = read_config({"model_type": outer, **SMALL}, "x", "x")
    assert flat.model_type == f"{outer}_text"
    # 6 layers x 2 x 2 heads x 8 x 10 tokens x 2 bytes.
    assert library.estimate(flat, context_tokens=10, engine="transformers")["kv_cache"]["total_bytes"] == 3840


def test_other_flat_configs_are_the_language_model_which_transformers_ignores() -> None:
    """mlx-lm writes such configs. Transformers' class takes the defaults of its inner class instead."""
    flat = {"model_type": "qwen3_5_moe", **SMALL, **DELTA, "head_dim": 8}
    spec = read_config(flat, "x", "x")
    assert (spec.model_type, spec.num_layers) == ("qwen3_5_moe_text", 6)
    assert "Transformers builds another model" in (spec.weights_reason or "")
    answer = library.estimate(spec, context_tokens=13, engine="transformers", dtype="bf16")
    assert answer["model"]["num_layers"] == 40
    assert answer["kv_cache"]["total_bytes"] == 65_146_880
    assert any("does not read all keys" in note["text"] for note in answer["warnings"])


@pytest.mark.parametrize(
    ("outer", "more", "inner"),
    [
        ("minicpmv", {"version": 2.6}, "qwen2"),
        ("minicpmv", {"version": "4.5"}, "qwen3"),
        ("minicpmv", {"query_num": 96}, "llama"),
        ("minicpmo", {"version": "2.6"}, "qwen2"),
        ("dots_ocr", {}, "qwen2"),
        ("Keye", {}, "qwen3"),
    ],
)
def test_flat_configs_with_their_own_code_are_their_language_model(
    outer: str, more: dict[str, object], inner: str
) -> None:
    spec = read_config({"model_type": outer, **SMALL, **more}, "x", "x")
    alone = read_config({"model_type": inner, **SMALL}, "x", "x")
    assert (spec.model_type, spec.layers, spec.around) == (inner, alone.layers, alone.around)
    assert not spec.in_transformers
    assert spec.as_transformers is None


def test_a_type_of_the_first_release_is_the_present_one() -> None:
    assert (
        read_config(wrapped("exaone4_5", {**SMALL, "model_type": "exaone4_5_text"}), "x", "x").model_type == "exaone4"
    )


def test_an_unknown_version_of_minicpm_is_refused() -> None:
    with pytest.raises(ModelError, match=r"version '3\.0'"):
        read_config({"model_type": "minicpmv", **SMALL, "version": "3.0"}, "x", "x")


@pytest.mark.parametrize("outer", ["llama4", "gemma3n"])
def test_an_inner_config_may_repeat_the_type_of_the_wrapper(outer: str) -> None:
    inner = {**SMALL, **OWN.get(str(WRAPPERS[outer].inner), {}), "model_type": outer}
    assert read_config(wrapped(outer, inner), "x", "x").model_type == WRAPPERS[outer].inner


def test_a_type_is_a_model_in_transformers_or_remote_or_a_wrapper() -> None:
    types = known_types()
    assert len(types) == len(set(types))
    assert all(is_remote(model_type) for model_type in set(types) & set(WRAPPERS))
