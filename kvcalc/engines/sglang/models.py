"""Which models run in SGLang, and how SGLang's pools read their configs. `models.yaml` has their types.

Source: get_total_num_kv_heads of srt/configs/model_config.py, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.declarations import FACTS, types_of
from kvcalc.engines.engine import not_established
from kvcalc.errors import ModelError
from kvcalc.model.caches import CompressedAttention, CrossAttention, LatentAttention
from kvcalc.model.spec import ModelSpec, all_caches, kv_head_counts

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
MINIMAX_M3 = ("minimax_m3", "minimax_m3_vl_text")


def check_model(spec: ModelSpec) -> None:
    """Raise ModelError for a model whose pools in SGLang are not modelled."""
    caches, kind = all_caches(spec), spec.model_type
    if kind not in types_of("sglang", "known") | types_of("sglang", "window_pool") or not caches:
        raise ModelError(f"{spec.name}: SGLang's layout of {kind} is not modelled")
    for cache in caches:
        if (
            isinstance(cache, CompressedAttention)
            or (isinstance(cache, CrossAttention) and kind not in types_of("sglang", "with_encoder"))
            or (
                isinstance(cache, LatentAttention) and cache.window and kind not in types_of("sglang", "latent_windows")
            )
        ):
            raise not_established(spec, "SGLang", cache.kind)
    problem = _misread(spec)
    if problem:
        raise ModelError(f"{spec.name}: SGLang {FACTS['sglang']['version']} {problem}")


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
    if isinstance(spec.quantization, Mapping) and spec.quantization.get("quant_method") == "minimax_m3_nvfp4":
        return "packs pages for minimax_m3_nvfp4 on Blackwell only; this is not modelled"
    return None
