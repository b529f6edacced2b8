"""Decoders compared with Transformers, per layer: windows, key names, defaults and latents of each family.

Needs the extra `oracle`; skipped without it. Nothing is downloaded and no weight is allocated.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.wrappers import INNER_SIZES
from tests.documents import estimate
from tests.oracle.held import held_by_layer

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TINY = {"vocab_size": 64, "intermediate_size": 48, "pad_token_id": 0}
SMALL = {**TINY, "hidden_size": 64, "num_hidden_layers": 7, "num_attention_heads": 4}
GQA = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
KV = {**SMALL, "num_key_value_heads": 2}
MOE = {
    "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 5}
MIXED = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    + ["sliding_attention"] * 3
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
THREE_ROPES = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
LATENT = {
    **SMALL, **MOE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip
INDEXED = {**LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
GPT = {**TINY, "n_embd": 64, "n_layer": 3, "n_head": 4}
BERT = {**SMALL, "is_decoder": True, "max_position_embeddings": 40}

# (model_type, config): one or more per family, with and without the optional keys.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("afmoe", {**GQA, **MOE, **WINDOW}),
    ("afmoe", {**SMALL, **MOE, **WINDOW, "global_attn_every_n_layers": 3}),
    ("aria_text", {**GQA, **MOE}),
    ("axk1", LATENT),
    ("axk2", INDEXED),
    ("beam", {**GQA, **MOE, **WINDOW}),
    ("biogpt", SMALL),
    ("bitnet", KV),
    ("chameleon", {**KV, "vocabulary_map": {"<image>": 3}}),
    ("codegen", {**GPT, "rotary_dim": 8}),
    ("cohere2_moe", {**GQA, **MOE, **WINDOW}),
    ("cohere2_moe", {**GQA, **MOE, **WINDOW, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}),
    (
        "cohere_compass_text",
        {**KV, **WINDOW, **MIXED, "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    ),
    ("cosmos3_edge_text", {**GQA, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}),
    ("ctrl", {**GPT, "dff": 32}),
    ("cwm", {**GQA, **WINDOW}),
    ("dbrx", {
        **TINY, "d_model": 64, "n_layers": 3, "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    }),
    ("deepseek_ocr2_text", {**KV, "mlp_layer_types": ["dense"] * 7}),
    ("diffllama", GQA),
    ("doge", {**KV, "keep_window_size": 3}),
    ("dots1", {**GQA, **MOE, **WINDOW, "max_window_layers": 4}),
    ("dots1", {**GQA, **MOE, **WINDOW}),
    ("emu3_text_model", KV),
    ("ernie4_5_moe", {**GQA, **MOE}),
    ("ernie4_5_vl_moe_text", {
        **KV, **MOE, "moe_intermediate_size": [8, 8], "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
    }),
    ("exaone4", {**KV, **WINDOW}),
    ("exaone4", {**KV, **WINDOW, "sliding_window_pattern": 3}),
    ("exaone_moe", {**KV, **MOE, **WINDOW, "first_k_dense_replace": 1}),
    ("flex_olmo", {**KV, **MOE}),
    ("flint", {**GQA, **MOE, **WINDOW}),
    ("gemma4_unified_text", {**GQA, **WINDOW, "global_head_dim": 32}),
    ("gemma4_unified_text", {
        **GQA, **WINDOW, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    }),
    ("git", SMALL),
    ("glm4v_text", {**KV, **THREE_ROPES}),
    ("glm4v_moe_text", {
        **GQA, **MOE, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    }),
    ("glm_ocr_text", {**KV, **THREE_ROPES}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    ("gpt_neo", {**TINY, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 5,
                 "attention_types": [[["global", "local"], 2]]}),
    ("gpt_neox_japanese", SMALL),
    ("gptj", {**GPT, "rotary_dim": 8}),
    ("granite4_vision_text", KV),
    ("granite_docling_text", KV),
    ("granite_swa", {**KV, **WINDOW}),
    ("granitemoe_swa", {**KV, **MOE, **WINDOW}),
    ("granitemoeshared", {**KV, **MOE}),
    ("higgs_audio_v2", GQA),
    ("hunyuan_v1_moe", {**GQA, "num_experts": 1, "moe_topk": 1}),
    ("hunyuan_vl_text", {**GQA, "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2, 2]}}),
    ("hy_v3", {**GQA, **MOE}),
    ("hy_v4", INDEXED),
    ("hy_v4", {**INDEXED, "indexer_types": ["full", "shared", "full", "shared", "shared", "full", "shared"]}),
    ("hyperclovax", GQA),
    ("internlm3", GQA),
    ("iquestcoder", GQA),
    ("jais2", GQA),
    ("jetmoe", {**TINY, "hidden_size": 64, "num_hidden_layers": 3, "num_key_value_heads": 2, "kv_channels": 8,
                "num_experts_per_tok": 2, "num_local_experts": 2}),
    ("kolibri1", {**GQA, **MOE, **WINDOW}),
    ("laguna", {**GQA, **MOE, **WINDOW, **MIXED}),
    ("mellum", {**GQA, **MOE, **WINDOW, **MIXED}),
    ("ministral", {**GQA, **WINDOW}),
    ("minimax_m3_vl_text", {
        **GQA, "num_local_experts": 2, "num_experts_per_tok": 1, "dense_intermediate_size": 8,
        "shared_intermediate_size": 8, "sparse_attention_config": {
            "sparse_attention_freq": [0, 1, 1, 0, 1, 1, 0], "sparse_index_dim": 16, "sparse_num_index_heads": 2,
            "sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1,
        },
    }),
    ("mistral4", LATENT),
    ("modernbert-decoder", {**SMALL, "local_attention": 10}),
    ("modernbert-decoder", {**SMALL, "local_attention": 10, "global_attn_every_n_layers": 2}),
    ("molmo2_text", GQA),
    ("mpt", {**TINY, "d_model": 64, "n_layers": 3, "n_heads": 4}),
    ("muse_glimmer_text", {**GQA, **WINDOW}),
    ("muse_spark_text", {**GQA, **MOE, **WINDOW, "moe_hidden_size": 16}),
    ("nanochat", KV),
    ("nemotron", GQA),
    ("opt", {**SMALL, "ffn_dim": 32}),
    ("paddleocr_vl_text", {**GQA, **THREE_ROPES}),
    ("persimmon", SMALL),
    ("phi4_multimodal", {**KV, **WINDOW}),
    ("qwen2_5_omni_text", {**KV, **THREE_ROPES, **WINDOW, "use_sliding_window": True, "max_window_layers": 3}),
    ("qwen2_moe", {**KV, **MOE, **WINDOW, "use_sliding_window": True, "max_window_layers": 5}),
    ("qwen2_moe", {**KV, **MOE, **WINDOW}),
    ("qwen3_omni_moe_text", {**GQA, **MOE, **THREE_ROPES}),
    ("smollm3", KV),
    ("smollm3", {**KV, **WINDOW, "use_sliding_window": True}),
    ("smollm3", {**KV, **WINDOW, **MIXED}),
    ("solar_open", {**GQA, **MOE}),
    ("step3p5", {**GQA, **MOE, **WINDOW, **MIXED}),
    ("xglm", {**TINY, "d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 32}),
    ("youtu", LATENT),
    ("bailing_hybrid", {**LATENT, "head_dim": 8, "layer_group_size": 3, "num_expert_group": 1}),
    ("csm", {**KV, "text_vocab_size": 64}),
    ("diffusion_gemma_text", {**GQA, **MOE, **WINDOW, "global_head_dim": 32, "top_k_experts": 1}),
    ("dots3_note_text", {
        **INDEXED, "head_dim": 12, "sliding_window": 5, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 12, "swa_kv_lora_rank": 20, "swa_head_dim": 16, "swa_qk_nope_head_dim": 10,
        "swa_v_head_dim": 8,
    }),
    ("dots3_note_text", {**INDEXED, "head_dim": 12, "use_sliding_window": False}),
    ("gemma4_text", {**GQA, **WINDOW, "num_hidden_layers": 6,
                     "per_layer_config": {"5": {"head_dim": 32, "num_key_value_heads": 1}}, "attention_k_eq_v": True}),
    ("glm4_moe", {**KV, **MOE, "hidden_size": 112, "num_attention_heads": 24}),
    ("glm5_next_text", {
        **{k: v for k, v in INDEXED.items() if k != "qk_rope_head_dim"}, "index_kpool": 2, "linear_head_dim": 8,
        "linear_num_heads": 2, "mlp_layer_types": ["dense"] * 7,
    }),
    ("gradium_phonon_tts", {**SMALL, "flow_head_config": {"condition_dim": 64}}),
    ("hrm_text", {**SMALL, "num_hidden_layers": 2, "head_dim": 16, "H_cycles": 1, "L_cycles": 2}),
    ("inkling_text", {**GQA, **MOE, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8,
                      "sliding_window_size": 5, "dense_mlp_idx": 7}),
    ("inkling_text", {**GQA, **MOE, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8,
                      "sliding_window_size": 5, "dense_mlp_idx": 7, "local_layer_ids": [1, 3]}),
    ("inkling2_text", {**GQA, **MOE, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 8,
                       "sliding_window_size": 5, "unpadded_vocab_size": 64}),
    ("llama", {**GQA, **WINDOW, **MIXED}),
    ("mistral_large4_text", {**{k: v for k, v in INDEXED.items() if k != "q_lora_rank"}, "head_dim": 4}),
    ("mistral_large4_text", {
        **{k: v for k, v in INDEXED.items() if k != "q_lora_rank"}, "kv_source_layers": [0, 0, 2, 3, 2, 5, 6],
        "no_rope_layers": [1, 1, 1, 0, 1, 1, 1],
        "indexer_types": ["full", "shared", "full", "full", "full", "shared", "full"],
    }),
    ("mimo_v2_flash", {**GQA, **MOE, "v_head_dim": 8, "sliding_window": 5, "mlp_layer_types": ["dense"] * 7}),
    ("moshi", {**SMALL, "sliding_window": 5, "ffn_dim": 32}),
    ("pocket_tts", {**SMALL, "flow_head_config": {"condition_dim": 64}}),
    ("zaya", {**GQA, **MOE, "router_hidden_size": 8}),
    ("zaya", {**GQA, **MOE, **WINDOW, "router_hidden_size": 8, "cca_time0": 3,
              "layer_types": ["hybrid", "hybrid_sliding", "hybrid"] * 2 + ["hybrid"]}),
    *((name, BERT) for name in ("bert", "big_bird", "roc_bert",
                                "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert",
                                "rembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")),
    ("electra", {**BERT, "embedding_size": 64}),
    ("roformer", {**BERT, "embedding_size": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=lambda value: value if isinstance(value, str) else None)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_every_layer_holds_what_kvcalc_says(model_type: str, config: dict[str, Any], kind: str) -> None:
    tokens = 13
    spec = kvcalc.read_config({"model_type": model_type, **config}, model_type, "small")
    answer = estimate(spec, context_tokens=tokens, dtype="bf16", engine="transformers", engine_settings={"cache": kind})
    said = [0] * spec.num_layers
    for row in answer["kv_cache"]["layers"]:
        for number in range(row["first"], row["last"] + 1):
            said[number] += row["bytes_per_layer"]
    assert said == held_by_layer(model_type, config, tokens, static=kind == "static")


@pytest.mark.parametrize("model_type", INNER_SIZES)
def test_sizes_left_out_inside_a_wrapper_are_the_class_own(model_type: str) -> None:
    from transformers import AutoConfig

    fields = type(AutoConfig.for_model(model_type)).__dataclass_fields__
    sizes = (fields[key].default for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    assert INNER_SIZES[model_type] == tuple(sizes)
