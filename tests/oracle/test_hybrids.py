"""kvcalc compared with Transformers for layers that keep more than K and V of past tokens, or something else.

These are states, compressed entries and an encoder's output, in small models with one prefill.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import kvcalc
from tests.documents import estimate
from tests.oracle.test_transformers import GQA, MLA, SMALL, _tensor_bytes

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MIXER = {"mamba_d_state": 8, "mamba_d_conv": 3}
MAMBA2 = {**MIXER, "mamba_chunk_size": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
BARE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
KDA = {
    **{k: v for k, v in MLA.items() if k != "q_lora_rank"},
    **PAD,
    "num_experts": 2,
    "num_experts_per_token": 1,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5],
        "full_attn_layers": [4, 6],
        "head_dim": 8,
        "num_heads": 2,
        "short_conv_kernel_size": 3,
    },
}
V4 = {
    **SMALL,
    **PAD,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "hc_mult": 2,
    "sliding_window": 5,
}
SPARSE = {
    **GQA,
    **PAD,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "dense_intermediate_size": 8,
    "shared_intermediate_size": 8,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("bamba", {**GQA, **MAMBA2, "attn_layer_indices": [2]}),
    ("bamba", {**SMALL, **MAMBA2, "num_key_value_heads": 4, "attn_layer_indices": [0, 5]}),
    ("falcon_h1", {**GQA, **MAMBA2, "mamba_d_ssm": 24, "mamba_d_head": 6}),
    ("falcon_h1", {**GQA, **MAMBA2, "mamba_d_ssm": None, "mamba_d_head": "auto"}),
    ("granitemoehybrid", {**GQA, **MAMBA2, **EXPERTS, "layer_types": ["mamba", "attention"] * 3}),
    ("granitemoehybrid", {**SMALL, **MAMBA2, **EXPERTS, "layer_types": ["full_attention"] + ["mamba"] * 5}),
    ("jamba", {**GQA, **MIXER, **EXPERTS, "mamba_dt_rank": 4, "attn_layer_period": 3, "attn_layer_offset": 1}),
    ("zamba", {**SMALL, **MIXER, "num_key_value_heads": 4, "mamba_dt_rank": 4, "attn_layer_period": 3,
               "attn_layer_offset": 1}),
    ("zamba2", {**SMALL, **MIXER, "n_mamba_heads": 4, "mamba_ngroups": 2, "adapter_rank": 4, "chunk_size": 4,
                "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"]}),
    ("zamba2", {**SMALL, **MIXER, "num_hidden_layers": 54, "n_mamba_heads": 4, "adapter_rank": 4, "chunk_size": 4}),
    ("lfm2", {**GQA, "layer_types": ["conv", "full_attention"] * 3}),
    ("lfm2", {**SMALL, "num_key_value_heads": 2, "full_attn_idxs": [1, 4]}),
    ("lfm2", {**SMALL, "num_key_value_heads": 2}),
    ("lfm2_moe", {**GQA, **EXPERTS, "layer_types": ["conv", "full_attention"] * 3}),
    ("lfm3", {**GQA, **PAD, "sliding_window": 5, "layer_types": ["conv", "full_attention", "sliding_attention"] * 2}),
    ("lfm3", {**GQA, **PAD, "sliding_window": 5}),
    ("kimi_linear", KDA),
    ("kimi_linear", {**KDA, "linear_attn_config": {"head_dim": 8, "num_heads": 2}, "linear_conv_kernel_dim": 2,
                     "layer_types": ["linear_attention", "full_attention"] * 3}),
    ("olmo_hybrid", {**SMALL, **PAD, "num_key_value_heads": 2}),
    ("olmo_hybrid", {**SMALL, **PAD, "linear_key_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    ("deepseek_v4", {**V4, "layer_types": ["sliding_attention", "compressed_sparse_attention"] * 2
                     + ["heavily_compressed_attention"] * 2,
                     "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6}}),
    ("deepseek_v4", {**V4, "compress_ratios": [0, 0, 4, 128, 4, 128, 0]}),
    ("deepseek_v4", V4),
    ("minimax_m3_vl_text", {**SPARSE, "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1, 0, 1, 1], "sparse_index_dim": 16, "sparse_num_index_heads": 2,
        "sparse_block_size": 4, "sparse_topk_blocks": 2, "sparse_local_block": 1}}),
    ("minimax_m3_vl_text", SPARSE),
    ("minimax", {**GQA, **EXPERTS, "block_size": 4}),
    ("minimax", {**GQA, **EXPERTS, "block_size": 4, "layer_types": ["linear_attention"] * 4 + ["full_attention"] * 2}),
    ("mamba", BARE),
    ("mamba", {**BARE, "intermediate_size": 48}),
    ("falcon_mamba", {**BARE, "expand": 4}),
    ("mamba2", {**BARE, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4}),
    ("qwen4_exp_text", {
        **GQA, **PAD, **EXPERTS, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "ple_layer_ids": [2], "ngram_vocab_size_base": 100, "ngram_size": 4,
        "heads_per_ngram": 2, "ple_embed_dim": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    }),
    ("cpmant", {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "dim_head": 16, "dim_ff": 32,
                "num_hidden_layers": 3, "prompt_length": 6}),
    ("xlstm", {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 4}),
    ("rwkv", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}),
]  # fmt: skip

BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 64, **PAD,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 8, "num_layers": 3, "num_heads": 4, **PAD}
WHISPER = {
    **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    "max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 4, "decoder_start_token_id": 1,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip

SEQUENCES: list[tuple[str, dict[str, Any]]] = [
    ("t5", T5),
    ("t5", {**T5, "num_decoder_layers": 2}),
    ("mt5", T5),
    ("umt5", T5),
    ("bart", BART),
    ("mbart", BART),
    ("pegasus", BART),
    ("marian", BART),
    ("m2m_100", BART),
    ("whisper", WHISPER),
]


def states_and_caches(model_type: str, config: dict[str, Any], tokens: int) -> int:
    """Bytes in the cache of a model built from `config`, after a prefill of `tokens` tokens in bf16 on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(model_type, **copy.deepcopy(config))
    built._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        out = model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True)
    if model_type == "rwkv":
        return sum(t.numel() * t.element_size() for t in out.state)
    if model_type == "xlstm":
        counter = out.cache_params.seqlen_offset
        kept = [t for layer in out.cache_params.rnn_state.values() for t in layer]
        return sum(t.numel() * t.element_size() for t in (*kept, counter))
    cache = out.cache_params if "cache_params" in out else out.past_key_values
    lightning = [t for t in getattr(cache, "linear_cache", ()) if isinstance(t, torch.Tensor)]
    return sum(map(_tensor_bytes, cache.layers)) + sum(t.numel() * t.element_size() for t in lightning)


def both_caches(model_type: str, config: dict[str, Any], tokens: int, encoder_tokens: int) -> int:
    """Bytes of an encoder-decoder's two caches after `tokens` decoder tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    loader = AutoModelForSpeechSeq2Seq if model_type == "whisper" else AutoModelForSeq2SeqLM
    built = AutoConfig.for_model(model_type, **copy.deepcopy(config))
    model = loader.from_config(built, dtype=torch.bfloat16).eval()
    asked = {"input_ids": torch.zeros(1, encoder_tokens, dtype=torch.long)}
    if model_type == "whisper":
        asked = {"input_features": torch.zeros(1, 4, 2 * encoder_tokens, dtype=torch.bfloat16)}
    with torch.no_grad():
        out = model(**asked, decoder_input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=True)
    kept = out.past_key_values
    layers = (*kept.self_attention_cache.layers, *kept.cross_attention_cache.layers)
    return sum(map(_tensor_bytes, layers))


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=lambda value: value if isinstance(value, str) else None)
@pytest.mark.parametrize("tokens", [1, 13, 20])
def test_what_hybrids_hold_is_what_kvcalc_says(model_type: str, config: dict[str, Any], tokens: int) -> None:
    spec = kvcalc.read_config({"model_type": model_type, **config}, model_type, "small")
    answer = estimate(spec, context_tokens=tokens, dtype="bf16", engine="transformers")
    assert answer["kv_cache"]["total_bytes"] == states_and_caches(model_type, config, tokens)


@pytest.mark.parametrize(("model_type", "config"), SEQUENCES, ids=lambda v: v if isinstance(v, str) else None)
@pytest.mark.parametrize("tokens", [1, 13])
def test_what_encoder_decoders_hold_is_what_kvcalc_says(model_type: str, config: dict[str, Any], tokens: int) -> None:
    spec = kvcalc.read_config({"model_type": model_type, **config}, model_type, "small")
    answer = estimate(spec, context_tokens=tokens, dtype="bf16", engine="transformers", encoder_tokens=20)
    assert answer["kv_cache"]["total_bytes"] == both_caches(model_type, config, tokens, 20)
