"""Which model types have their own class in SGLang, and how SGLang's pools read their configs.

Source: EntryClass of srt/models, is_hybrid_swa_model and get_total_num_kv_heads of srt/configs/model_config.py, SGLang
0.5.23. Other types may run with classes of Transformers, whose pools are not modelled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.engine import not_established
from kvcalc.errors import ModelError
from kvcalc.model.caches import CompressedAttention, CrossAttention, IndexerKeys, LatentAttention, RecurrentState
from kvcalc.model.spec import ModelSpec, all_caches, kv_head_counts

VERSION = "0.5.23"

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl_text")

# Types whose windows have a separate pool. For other types, windowed layers keep all tokens (is_hybrid_swa_model).
WINDOW_POOL = (
    *GEMMA4, "beam", "gpt_oss", "granite_swa", "granitemoe_swa", "laguna", "llama4_text", "mellum", "mimo_v2_flash",
    "muse_glimmer_text", "step3p5", "step3p7",
)  # fmt: skip

# Types whose pool has rows for every layer, even if a layer shares another layer's cache or has no attention. And types
# whose token table begins with the encoder's tokens.
ALL_LAYERS = (*GEMMA4, "gemma3n_text", "nemotron-nas", "whisper")
WITH_ENCODER = ("mllama_text_model", "whisper")

# Types whose states keep two extra slots per request, so that steps overlap while prefixes are cached
# (_MAMBA_EXTRA_BUFFER_ARCHS and _mamba_radix_cache_resolution, arg_groups/overrides.py).
WITH_EXTRA_STATES = (
    "falcon_h1", "granitemoehybrid", "kimi_linear", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip

_KNOWN = (
    "afmoe apertus arcee baichuan bailing_moe bailing_moe_v2 chatglm cohere cohere2 cohere2_moe dbrx deepseek "
    "deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone exaone4 exaone_moe "
    "falcon_h1 gemma gemma2 gemma3_text gemma3n_text generic glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text "
    "glm_moe_dsa glm_ocr_text gpt2 gpt_bigcode gptj granite granitemoe granitemoehybrid granitemoeshared grok-1 "
    "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 internlm2 internlm3 iquestcoder kimi_k2 kimi_linear lfm2 lfm2_moe "
    "llama llava llava_llama llava_mistral llava_qwen longcat_flash mimo minicpm minicpm3 minimax_m2 minimax_m3 "
    "minimax_m3_vl_text ministral3 mistral mixtral mllama_text_model nemotron-nas nemotron_h olmo olmo2 olmo3 olmoe "
    "opt orion paddleocr_vl_text persimmon phi phi3 phi4mm phimoe qwen qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text "
    "qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text "
    "stablelm starcoder2 whisper xverse"
).split()


def check_model(spec: ModelSpec) -> None:
    """Raise ModelError for a model whose pools in SGLang are not modelled."""
    caches, kind = all_caches(spec), spec.model_type
    keeps_tokens = any(not isinstance(cache, RecurrentState) for cache in caches)
    if kind not in (*_KNOWN, *WINDOW_POOL) or not keeps_tokens:
        raise ModelError(f"{spec.name}: SGLang's layout of {kind} is not modelled")
    for cache in caches:
        if (
            isinstance(cache, CompressedAttention)
            or (isinstance(cache, CrossAttention) and kind not in WITH_ENCODER)
            or (isinstance(cache, LatentAttention) and cache.window is not None)
        ):
            raise not_established(spec, "SGLang", cache.kind)
    problem = _misread(spec)
    if problem:
        raise ModelError(f"{spec.name}: SGLang {VERSION} {problem}")


def is_sparse(spec: ModelSpec) -> bool:
    """Whether the model has MLA with an indexer (DeepSeek sparse attention)."""
    caches = all_caches(spec)
    return any(isinstance(c, IndexerKeys) for c in caches) and any(isinstance(c, LatentAttention) for c in caches)


def _misread(spec: ModelSpec) -> str | None:
    """The reason why SGLang would misread the cache from this config, or None."""
    config, kind, shape = spec.stated, spec.model_type, spec.attention
    if kind == "chatglm" and config.get("multi_query_group_num", 1) != shape.num_kv_heads:
        # ChatGLMConfig of srt/configs/chatglm.py, whose default is one group.
        return "uses multi_query_group_num and ignores multi_query_attention"
    if kind == "nemotron-nas":
        if len(kv_head_counts(spec)) > 1:
            return "uses one number of KV heads for all layers of nemotron-nas; the model has several"
        blocks: Any = config.get("block_configs") or []
        if any((block.get("attention") or {}).get("replace_with_linear") for block in blocks):
            return "does not support layers whose attention is a linear map"
    if kind == "hy_v4" and config.get("indexer_types") is None:
        # Without the list, every layer has an indexer (dsa_layer_skips_topk).
        return "assumes an indexer in every layer of hy_v4 if indexer_types is missing"
    if kind == "whisper" and config.get("encoder_attention_heads") != config.get("decoder_attention_heads"):
        return "uses one number of heads for Whisper's encoder and decoder; the model has two"
    if kind in MINIMAX_M3:
        quantization = spec.quantization
        if isinstance(quantization, Mapping) and quantization.get("quant_method") == "minimax_m3_nvfp4":
            return "packs pages for minimax_m3_nvfp4 on Blackwell only; this is not modelled"
    return None
