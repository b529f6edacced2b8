"""Mutated realistic configs give an answer or a clean error, and never a crash."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcalc
from kvcalc.model.presets import all_presets
from kvcalc.model.wrappers import WRAPPERS
from tests.documents import estimate
from tests.model.test_hybrid_families import DELTA, MLA, NEMOTRON, SMALL
from tests.model.test_state_families import GQA, JAMBA, KDA, T5_BASE, V4_FLASH, WHISPER

CONFIGS: list[dict[str, Any]] = [
    *(preset.config for preset in all_presets()),
    {"model_type": "gemma3_text", **SMALL, "sliding_window": 5},
    {"model_type": "gemma4_text", **SMALL, "sliding_window": 5, "num_kv_shared_layers": 0},
    {"model_type": "qwen2", **SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    {"model_type": "llama4_text", **SMALL, "attention_chunk_size": 5},
    {"model_type": "glm_moe_dsa", **SMALL, **MLA, "index_topk_pattern": "FSFFSS"},
    {"model_type": "minicpm3", **SMALL, **MLA},
    {"model_type": "qwen3_next", **SMALL, **DELTA, "full_attention_interval": 4},
    {"model_type": "gpt_neo", **SMALL, "num_layers": 6, "num_heads": 4, "attention_types": [[["global", "local"], 3]]},
    {"model_type": "mpt", "n_layers": 6, "n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 4}},
    {"model_type": "dbrx", "n_layers": 6, "n_heads": 4, "d_model": 32, "attn_config": {"kv_n_heads": 2}},
    {"model_type": "deci", **SMALL, "num_key_value_heads_per_layer": [2] * 6},
    {"model_type": "nemotron-nas", **SMALL, "block_configs": [{"attention": {"n_heads_in_group": 2}}] * 6},
    {
        "model_type": "openelm",
        "num_transformer_layers": 2,
        "head_dim": 8,
        "model_dim": 32,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
    },
    {"model_type": "chatglm", **SMALL, "num_layers": 6, "head_dim": None, "num_key_value_heads": None},
    {"model_type": "smollm3", **SMALL, "use_sliding_window": True, "sliding_window": 5},
    {"model_type": "cohere2_moe", **SMALL, "sliding_window": 5, "first_k_dense_replace": 2},
    {"model_type": "step3p5", **SMALL, "sliding_window": 5, "attention_other_setting": {"num_attention_groups": 2}},
    {"model_type": "nemotron_h", **SMALL, **NEMOTRON, "hybrid_override_pattern": "M-*EM*"},
    {"model_type": "jamba", **JAMBA},
    {"model_type": "deepseek_v4", **V4_FLASH},
    {"model_type": "whisper", **WHISPER},
    {"model_type": "t5", **T5_BASE},
    {"model_type": "kimi_linear", **KDA, "layer_types": ["linear_attention", "full_attention"] * 2},
    {"model_type": "minimax_m3", **GQA, "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1, 1, 1]}},
    {"model_type": "zamba2", **GQA, "layers_block_type": ["mamba", "hybrid"] * 3, "n_mamba_heads": 4},
    {"model_type": "lfm2", **GQA, "full_attn_idxs": [1, 4]},
    {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2},
    {"model_type": "recurrent_gemma", **GQA},
    {"model_type": "mllama_text_model", **GQA},
    *(
        {"model_type": outer, "text_config": {**SMALL, **MLA, **DELTA}}
        for outer, wrapper in WRAPPERS.items()
        if wrapper.keys == ("text_config",)
    ),
]

LETTERS = ["full_attention", "sliding_attention", "M"]
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**30),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.none(), st.integers(-1, 3), st.sampled_from(LETTERS)), max_size=8),
    st.sampled_from(sorted({config["model_type"] for config in CONFIGS})),
)
keys = sorted(
    {key for config in CONFIGS for key in config} | {"window_size", "text_config", "torch_dtype", "layer_types"}
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Drop, change or add up to four keys of a config, or of the language model's part of it."""
    config = dict(draw(st.sampled_from(CONFIGS)))
    inner = config.get("text_config")
    target = config
    if isinstance(inner, dict) and draw(st.booleans()):
        target = config["text_config"] = dict(inner)
    for key in draw(st.lists(st.sampled_from(keys), max_size=4)):
        if draw(st.booleans()):
            target.pop(key, None)
        else:
            target[key] = draw(odd_values)
    return config


@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
@given(mutated(), st.sampled_from([1, 100, 10**6]), st.sampled_from(["logical", "transformers"]))
def test_an_answer_or_a_clean_refusal(config: dict[str, Any], tokens: int, engine: str) -> None:
    refusal = answer = None
    try:
        answer = estimate(kvcalc.read_config(config, "config", "test"), context_tokens=tokens, engine=engine)
    except kvcalc.KvcalcError as error:
        refusal = error
    if refusal is not None:
        assert refusal.exit_code in (2, 3)
        assert refusal.message
        assert "\n" not in refusal.message
    else:
        assert answer is not None
        assert isinstance(answer["kv_cache"]["total_bytes"], int)
        assert answer["kv_cache"]["total_bytes"] >= 0
