"""Parameters compared with Transformers: the same small models, built on the meta device.

Needs the extra `oracle`; skipped without it. Nothing is downloaded and no weight is allocated.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.families.decoder_table import model_types, row
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.type_tables import FAMILIES
from tests.oracle.test_hybrids import BARE, KDA, MAMBA2, SEQUENCES, SPARSE, T5, V4
from tests.oracle.test_hybrids import CASES as HYBRIDS
from tests.oracle.test_towers import CASES as TOWERS
from tests.oracle.test_transformers import CASES, DELTA, GQA, INDEXED, MLA, MOE, SMALL, WINDOW

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

BIAS = {"attention_bias": True}
TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
KV = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {"shared_expert_intermediate_size": 8}
PER_LAYER = {"vocab_size_per_layer_input": 20, "hidden_size_per_layer_input": 6}
NEMOTRON = {
    **GQA, "num_hidden_layers": 5, "hybrid_override_pattern": "M-*EM", "mamba_num_heads": 4, "mamba_head_dim": 16,
    "n_groups": 2, "ssm_state_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
}  # fmt: skip
MIMO = {
    **GQA, "v_head_dim": 4, "sliding_window_size": 4, "sliding_window": 4, "swa_num_key_value_heads": 4,
    "swa_head_dim": 8, "swa_v_head_dim": 4, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "n_routed_experts": 2,
    "num_experts_per_tok": 1, "moe_intermediate_size": 8, "partial_rotary_factor": 0.5,
}  # fmt: skip

OPT = {
    "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 20, "word_embed_proj_dim": 32,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
DBRX = {
    "vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
INKLING = {
    **SMALL, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "sliding_window_size": 4, "d_rel": 2, "rel_extent": 6, "moe_intermediate_size": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
}  # fmt: skip
LING = {
    **{k: v for k, v in MLA.items() if k != "q_lora_rank"}, "head_dim": 8, "moe_intermediate_size": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "layer_group_size": 3,
}  # fmt: skip

# Keys that change the weights but not the cache: biases, tied embeddings, norms, experts in some layers.
WEIGHT_CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {**GQA, **BIAS, "mlp_bias": True, **TIED}),
    ("llama", {k: v for k, v in GQA.items() if k not in ("vocab_size", "intermediate_size")}),
    ("starcoder2", {**KV, "use_bias": False, **UNTIED}),
    ("afmoe", {**GQA, **MOE, **WINDOW, "num_dense_layers": 1, "num_shared_experts": 2}),
    ("iquestcoder", {**GQA, **BIAS, "mlp_bias": True}),
    ("mellum", {**GQA, **MOE, **WINDOW}),
    ("gemma4_unified_text", {**GQA, **WINDOW, "global_head_dim": 16}),
    ("jais2", {**KV, "attention_bias": False, "mlp_bias": False}),
    ("hy_v3", {**GQA, **MOE, "mlp_layer_types": ["sparse", *["dense"] * (GQA["num_hidden_layers"] - 1)]}),
    ("phi", {**KV, "qk_layernorm": True}),
    ("phimoe", {**KV, **EXPERTS, **BIAS, "lm_head_bias": True}),
    ("qwen2", {**KV, **TIED}),
    ("qwen3", {**GQA, **BIAS}),
    ("qwen3_moe", {**GQA, **MOE, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**GQA, **MOE, "mlp_only_layers": [0, 3], **BIAS}),
    # Other key names for the number of experts.
    ("qwen3_moe", {**GQA, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}),
    ("minimax_m2", {**GQA, "num_experts": 2, "num_experts_per_tok": 1}),
    ("gemma", {**GQA, **BIAS, **UNTIED}),
    ("gemma2", {**GQA, **BIAS}),
    ("gemma3_text", {**GQA, **BIAS, **UNTIED}),
    (
        "gemma3n_text",
        {
            **GQA, **WINDOW, **PER_LAYER, "num_kv_shared_layers": 3, "num_hidden_layers": 10, "laurel_rank": 3,
            "intermediate_size": [16] * 5 + [32] * 5, "altup_num_inputs": 2,
        },
    ),
    (
        "gemma4_text",
        {
            **GQA, **WINDOW, "num_kv_shared_layers": 6, "num_hidden_layers": 12, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    (
        "gemma4_text",
        {
            **GQA, **WINDOW, **PER_LAYER, **BIAS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 8,
        },
    ),
    ("gpt_oss", {**GQA, **EXPERTS, "attention_bias": False, **TIED}),
    ("olmo", {**KV, **BIAS}),
    ("olmo2", {**KV, **BIAS}),
    ("olmo3", {**KV, **BIAS, **TIED}),
    ("olmoe", {**KV, **MOE, **BIAS}),
    ("cohere", {**KV, "use_qk_norm": True, **BIAS}),
    ("cohere2", {**KV, **BIAS, **UNTIED}),
    ("glm", {**GQA, "pad_token_id": 0, "attention_bias": False}),
    ("glm4", {**GQA, "pad_token_id": 0, "attention_bias": False, **TIED}),
    ("glm4_moe", {**GQA, **ROUTED, "use_qk_norm": True, "first_k_dense_replace": 2, **BIAS}),
    ("granite", {**KV, **BIAS, "mlp_bias": True}),
    ("granitemoe", {**KV, **EXPERTS, **BIAS}),
    ("arcee", {**GQA, **BIAS, "mlp_bias": True}),
    ("apertus", {**KV, **BIAS}),
    ("helium", {**GQA, "pad_token_id": 0, **BIAS, "mlp_bias": True}),
    ("seed_oss", {**GQA, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("ernie4_5", {**GQA, "use_bias": True}),
    ("hunyuan_v1_dense", {**GQA, **BIAS}),
    ("stablelm", {**KV, "use_qkv_bias": True, "qk_layernorm": True}),
    ("stablelm", {**KV, "use_parallel_residual": True}),
    ("gpt_neox", {**SMALL, "attention_bias": False, **TIED}),
    ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, **UNTIED}),
    ("gpt2", {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 10, "n_positions": 20, **UNTIED}),
    ("falcon", {**SMALL, "multi_query": True, "bias": True, "parallel_attn": False, **UNTIED}),
    ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40, "bias": True}),
    ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    (
        "llama4_text",
        {**GQA, **EXPERTS, **BIAS, "attention_chunk_size": 5, "intermediate_size_mlp": 16,
         "interleave_moe_layer_step": 2},
    ),
    ("llama4_text", {**GQA, "attention_chunk_size": 5, "num_local_experts": 2, "moe_layers": [1, 4]}),
    ("deepseek_v2", {**MLA, **BIAS, "n_shared_experts": 2}),
    ("deepseek_v3", {**MLA, **BIAS, "first_k_dense_replace": 3}),
    ("deepseek_v3", {**MLA, "q_lora_rank": None, **TIED}),
    ("deepseek_v32", {**INDEXED, **BIAS}),
    ("glm_moe_dsa", {**INDEXED, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3}),
    ("glm4_moe_lite", {**MLA, "first_k_dense_replace": 3}),
    ("glm4_moe_lite", {**MLA, "mlp_layer_types": ["dense"] * 4 + ["sparse"] * 2, **BIAS}),
    ("minicpm3", {**{k: v for k, v in MLA.items() if k != "v_head_dim"}, **BIAS, "mlp_bias": True, **UNTIED}),
    ("qwen3_next", {**GQA, **MOE, **DELTA, **SHARED, **BIAS, "mlp_only_layers": [1]}),
    ("qwen3_5_text", {**GQA, **DELTA, **BIAS, **TIED}),
    ("qwen3_5_moe_text", {**GQA, **MOE, **DELTA, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]}),
    (
        "nemotron_h",
        {**NEMOTRON, **BIAS, "moe_latent_size": 6, "use_bias": True, "mlp_bias": True, "use_conv_bias": False},
    ),
    ("mimo_v2_flash", {**MIMO, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4, **BIAS}),
    ("bert", {**SMALL, "max_position_embeddings": 40, "type_vocab_size": 1}),
    *((name, {**SMALL, "max_position_embeddings": 42, "type_vocab_size": 1})
      for name in ("camembert", "roberta", "xlm-roberta")),
    ("qwen2_moe", {**KV, **MOE, "shared_expert_intermediate_size": 12}),
    ("qwen2_moe", {**KV, **MOE, "shared_expert_intermediate_size": 12, "qkv_bias": False, "mlp_only_layers": [2]}),
    ("smollm3", {**KV, "pad_token_id": 0}),
    ("dots1", {**GQA, **ROUTED, **BIAS, "first_k_dense_replace": 2}),
    ("exaone4", KV),
    ("cwm", {**GQA, **WINDOW}),
    ("solar_open", {**GQA, **ROUTED, **BIAS}),
    ("nemotron", {**KV, **BIAS, "mlp_bias": True}),
    ("exaone_moe", {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                    "num_shared_experts": 2, "first_k_dense_replace": 2}),
    ("exaone_moe", {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                    "mlp_layer_types": ["dense", "sparse"] * 3}),
    ("ernie4_5_moe", {**GQA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_layer_interval": 2,
                      "moe_layer_end_index": 4, "moe_num_shared_experts": 1, "use_bias": True}),
    ("ernie4_5_moe", {**GQA, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 0, **UNTIED}),
    ("internlm3", GQA),
    ("persimmon", {**SMALL, "qk_layernorm": False}),
    ("persimmon", SMALL),
    ("opt", OPT),
    ("opt", {**OPT, "word_embed_proj_dim": 16, "enable_bias": False, "_remove_final_layer_norm": True}),
    ("opt", {**OPT, "layer_norm_elementwise_affine": False, "do_layer_norm_before": False}),
    ("gptj", {**GPT, "rotary_dim": 4}),
    ("codegen", {**GPT, "rotary_dim": 4, "n_inner": 20}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False, "n_positions": 20}),
    ("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 3, "n_heads": 4}),
    ("dbrx", DBRX),
    ("t5", {**T5, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 5}),
    ("mllama_text_model", {**KV, "cross_attention_layers": [1, 3, 9], "pad_token_id": 0}),
    ("mamba", {**BARE, "use_bias": True, "use_conv_bias": False, "time_step_rank": 5, **UNTIED}),
    ("mamba2", {**BARE, "num_heads": 4, "head_dim": 16, "n_groups": 2, "use_bias": True, **TIED}),
    ("lfm2", {**KV, "layer_types": ["conv", "full_attention"] * 3, "block_auto_adjust_ff_dim": False}),
    ("lfm2", {**KV, "conv_bias": True, "full_attn_idxs": [1], "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5}),
    ("bamba", {**GQA, **MAMBA2, **BIAS, "attn_layer_indices": [2], "mlp_bias": True, "mamba_proj_bias": True}),
    (
        "falcon_h1",
        {**GQA, **MAMBA2, **BIAS, "mamba_d_ssm": 64, "mamba_rms_norm": True, "projectors_bias": True, "mlp_bias": True,
         "mamba_conv_bias": False},
    ),
    ("granitemoehybrid", {**KV, **MAMBA2, "layer_types": ["mamba", "attention"] * 3, "num_local_experts": 0}),
    (
        "kimi_linear",
        {**{k: v for k, v in KDA.items() if k != "n_shared_experts"}, **BIAS, "q_lora_rank": 12,
         "num_shared_experts": 2, "first_k_dense_replace": 3},
    ),
    ("minimax_m3_vl_text", {**SPARSE, "moe_layer_freq": [0, 0, 1, 1, 1, 1], "tie_word_embeddings": True,
                            "sparse_attention_config": {"sparse_attention_freq": [0, 1] * 3,
                                                        "sparse_num_index_heads": 3}}),
    ("laguna", {**GQA, **MOE, "num_attention_heads_per_layer": [4, 2] * 3, "shared_expert_intermediate_size": 12}),
    ("laguna", {**GQA, **MOE, "gating": "per-element", "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3}),
    ("hunyuan_v1_moe", {**GQA, "num_experts": 4, "moe_topk": [2] * 6, "pad_token_id": 0}),
    ("cohere2_moe", {**GQA, **WINDOW, "num_experts": 4, "num_shared_experts": 2, "first_k_dense_replace": 2}),
    ("cohere2_moe", {**GQA, "num_experts": 4, "first_k_dense_replace": 2, "prefix_dense_intermediate_size": 24}),
    ("flex_olmo", {**KV, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    ("granite_swa", {**KV, **WINDOW, "mlp_bias": True}),
    ("gpt_neo", {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 20,
                 "attention_types": [[["global", "local"], 1]]}),
    ("youtu", {**MLA, "pad_token_id": 0}),
    ("dots3_note_text", {**INDEXED, "sliding_window": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
                         "swa_q_lora_rank": 12, "swa_kv_lora_rank": 24, "swa_head_dim": 12, "swa_qk_nope_head_dim": 8,
                         "swa_v_head_dim": 8, "pad_token_id": 0}),
    ("axk1", {**MLA, "first_k_dense_replace": 2}),
    ("hy_v4", {**INDEXED, "hc_mult": 2, "pad_token_id": 0}),
    ("inkling_text", INKLING),
    ("inkling_text", {**INKLING, "dense_mlp_idx": 2, "dense_intermediate_size": 24}),
    ("bailing_hybrid", {**LING, "mlp_layer_types": ["sparse", "dense"] * 3}),
    ("deepseek_v4", {k: v for k, v in V4.items() if k != "intermediate_size"}),
    (
        "deepseek_v4",
        {**{k: v for k, v in V4.items() if k != "intermediate_size"}, "compress_ratios": [0, 0, 4, 128, 4, 128, 0]},
    ),
]  # fmt: skip


_LIKE_BERT = ("bert", "camembert", "roberta", "xlm-roberta")
# DeepSeek-V4's own cases set its width under two names, with different values.
ALL = [*CASES, *SEQUENCES, *(case for case in HYBRIDS if case[0] != "deepseek_v4"), *WEIGHT_CASES]


def built_by_transformers(model_type: str, config: dict[str, Any]) -> tuple[int, int]:
    """All parameters (shared ones once), and those of the input embedding. BERT has no head for pretraining."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

    built: Any = AutoConfig.for_model(model_type, **copy.deepcopy(config))
    model: Any
    with torch.device("meta"):
        if model_type == "mllama_text_model":
            model = MllamaForCausalLM(built)
        else:
            sequences = {model_type for model_type, _ in SEQUENCES}
            loaders = {**dict.fromkeys(sequences, AutoModelForSeq2SeqLM), **dict.fromkeys(_LIKE_BERT, AutoModel)}
            loaders["whisper"] = AutoModelForSpeechSeq2Seq
            model = loaders.get(model_type, AutoModelForCausalLM).from_config(built)
    return sum(p.numel() for p in model.parameters()), model.get_input_embeddings().weight.numel()


def read(model_type: str, config: dict[str, Any]) -> ModelSpec:
    return kvcalc.read_config({"model_type": model_type, **config}, model_type, "small")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [case for case in ALL if read(*case).around is not None],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_transformers_builds_is_what_kvcalc_counts(model_type: str, config: dict[str, Any]) -> None:
    weights = weights_of(read(model_type, config))
    assert weights is not None
    counted = count_parameters(weights)
    assert (counted.total, counted.input_embedding) == built_by_transformers(model_type, config)


# Language models that only exist inside multimodal models and have no class with a head: (type, module, class).
TEXT_MODELS = [
    ("qwen2_vl_text", "qwen2_vl", "Qwen2VLText"),
    ("qwen2_5_vl_text", "qwen2_5_vl", "Qwen2_5_VLText"),
    ("qwen3_vl_text", "qwen3_vl", "Qwen3VLText"),
    ("qwen3_vl_moe_text", "qwen3_vl_moe", "Qwen3VLMoeText"),
    ("qwen3_omni_moe_text", "qwen3_omni_moe", "Qwen3OmniMoeThinkerText"),
    ("mistral4", "mistral4", "Mistral4"),
    ("ernie4_5_vl_moe_text", "ernie4_5_vl_moe", "Ernie4_5_VLMoeText"),
    ("glm5_next_text", "glm5_next", "Glm5NextText"),
    ("hunyuan_vl_text", "hunyuan_vl", "HunYuanVLText"),
    ("muse_glimmer_text", "muse_glimmer", "MuseGlimmerText"),
    ("qwen2_5_omni_text", "qwen2_5_omni", "Qwen2_5OmniThinkerText"),
    ("step3p5", "step3p7", "Step3p7Text"),
    ("unlimited_ocr_text", "unlimited_ocr", "UnlimitedOcrText"),
]

_MORE: dict[str, dict[str, Any]] = {
    "ernie4_5_vl_moe_text": {"moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": [8, 4],
                             "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
    "glm5_next_text": {"n_routed_experts": 2, "pad_token_id": 0, "index_n_heads": 2, "hc_mult": 2,
                       "num_key_value_heads": 4,
                       "linear_attn_config": {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}},
    "hunyuan_vl_text": {"head_dim": 8},
    "muse_glimmer_text": {"head_dim": 8, **WINDOW},
    "step3p5": {**WINDOW, "head_dim": 8, "num_sliding_attention_heads": 6, "n_routed_experts": 2,
                "layer_types": ["full_attention", "sliding_attention"] * 3},
    "unlimited_ocr_text": {"n_routed_experts": 2, "n_shared_experts": 2, "num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "module", "name"), TEXT_MODELS, ids=[case[0] for case in TEXT_MODELS])
def test_language_models_of_multimodal_ones(model_type: str, module: str, name: str) -> None:
    """These classes only have the embedding, which is counted as if it were the head."""
    from importlib import import_module

    import torch

    folder = f"transformers.models.{module}"
    config = {**KV, **MOE, **({"head_dim": 8, **BIAS} if module.startswith("qwen3") else {})}
    if model_type == "mistral4":
        config = {**MLA, **ROUTED, "first_k_dense_replace": 1}
    config |= _MORE.get(model_type, {})
    built = getattr(import_module(f"{folder}.configuration_{module}"), f"{name.replace('Thinker', '')}Config")(**config)
    with torch.device("meta"):
        model = getattr(import_module(f"{folder}.modeling_{module}"), f"{name}Model")._from_config(built)
    weights = weights_of(read(model_type, {**config, **TIED}))
    assert weights is not None
    assert count_parameters(weights).total == sum(p.numel() for p in model.parameters())


def test_diffusion_gemmas_decoder_and_its_self_conditioning() -> None:
    import torch
    from transformers.models.diffusion_gemma import configuration_diffusion_gemma, modeling_diffusion_gemma

    config: dict[str, Any] = {
        "num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 8, "sliding_window": 4,
    }  # fmt: skip
    text = configuration_diffusion_gemma.DiffusionGemmaTextConfig(**config)
    whole = configuration_diffusion_gemma.DiffusionGemmaConfig(text_config=text)
    with torch.device("meta"):
        model = modeling_diffusion_gemma.DiffusionGemmaDecoderModel(whole)
    weights = weights_of(read("diffusion_gemma_text", {**config, "global_head_dim": 512, **TIED}))
    assert weights is not None
    assert count_parameters(weights).total == sum(p.numel() for p in model.parameters())


# Types with their own reader whose weights are not counted, and encoders, of which only BERT's are counted.
_FAMILIES_NOT_COUNTED = "bert composed hrm_text qwen4 sequences xlstm".split()
NOT_COUNTED = set(
    (
        "axk2 dory gemma4_unified_assistant inkling2_loop_text inkling2_text jetmoe lara_mini "
        "mistral_large4_text modernbert modernbert-decoder recurrent_gemma rwkv6 zaya"
    ).split()
) | {model_type for model_type, module in FAMILIES.items() if module in _FAMILIES_NOT_COUNTED} - {*_LIKE_BERT}


def test_every_counted_family_is_compared() -> None:
    compared = {model_type for model_type, _ in ALL} | {case[0] for case in TEXT_MODELS} | {"diffusion_gemma_text"}
    compared |= {config.get("text_config", {}).get("model_type", outer) for outer, config in TOWERS}
    counted = {model_type for model_type in model_types() if row(model_type).get("vocab_size")} | set(FAMILIES)
    # These are read as another type that is compared: DeepSeek-V3, LLaMA, Phi-3, Qwen2 and Qwen3. Molmo and Qwen have
    # no class in Transformers, and are compared with published checkpoints (tests/model/test_towers.py). Nor have the
    # types of tests/model/test_published_sizes.py, and LLaDA 2 and Spark 2.5, which are read as vLLM's and SGLang's
    # classes. Apertus 1.5 is in Transformers since 5.24: its class has as many parameters, 18,482,836 for the config in
    # tests/model/type_bytes.jsonl. Gemma 4's drafter is no model of its own (tests/server/test_drafting.py).
    assert counted - compared - NOT_COUNTED == {
        "apertus1p5_text", "baichuan", "bailing_moe", "bailing_moe_v2", "chatglm", "deepseek", "exaone",
        "gemma4_assistant", "hyperclovax", "internlm", "internlm2", "kimi_k2", "llada2_moe", "llama_bidirec", "llava",
        "llava_llama", "llava_mistral", "llava_qwen", "mimo", "mimo_v2_asr", "minicpm", "molmo", "orion", "phi3_v",
        "phi4", "phi4mm", "qwen", "sdar", "sdar_moe", "spark2_5", "xverse",
    }  # fmt: skip
