"""Which model types llama.cpp converts, and how its files and its cache treat their windows.

Source: the classes registered in conversion/ and load_arch_hparams of src/models, in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.decoder_table import row
from kvcalc.model.families.window_patterns import OneFullIn, full_every, full_first_of
from kvcalc.model.spec import ModelSpec

# Types whose states are kept for each drafted token (llm_arch_supports_rs_rollback, src/llama-arch.cpp). The server
# restores other types from a checkpoint.
ROLLS_BACK = ("deepseek_ref", "deepseek_v4", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text")

# Types with a second cache for windows (swa_type). The file lists the layers that have windows.
_LISTED = (
    "cohere2_moe exaone_moe gemma3n_text gemma4_text gemma4_unified_text granite_swa granitemoe_swa mellum "
    "mimo_v2_flash muse_glimmer_text olmo3 step3p5 step3p7"
).split()

# The same, but the file does not list the layers. The architecture has a fixed rule (load_swa_pattern). If the config
# of a type need not list the layers, this is the model's own rule (None here); otherwise it is llama.cpp's.
_RULED: dict[str, OneFullIn | None] = {
    **dict.fromkeys(("afmoe", "cohere2", "gemma2", "gemma3_text", "gpt_oss")),
    "laguna": full_first_of(4), "llama4_text": full_every(4),
}  # fmt: skip

# Types whose windows are ignored in the cache: every token has a cell.
_FULL_LENGTH = (
    "dots1 ministral3 mistral mixtral phi3 phi4 phimoe qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text "
    "qwen3 qwen3_moe smollm3 starcoder2"
).split()

# Types whose windows are not read. A model of these types with a window is refused.
_PLAIN = (
    "apertus arcee arctic baichuan bailing_moe bailing_moe_v2 bamba bitnet bloom chameleon chatglm cohere dbrx "
    "deepseek deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe exaone falcon falcon_h1 falcon_mamba gemma "
    "generic glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa glm_ocr_text gpt2 gpt_bigcode "
    "gpt_neox granite granitemoe granitemoehybrid granitemoeshared grok-1 hunyuan_v1_dense hunyuan_v1_moe "
    "hunyuan_vl_text hy_v3 hy_v4 internlm2 internlm3 iquestcoder jais jais2 jamba kimi_k2 kimi_linear lfm2 lfm2_moe "
    "llama llava mamba mamba2 minicpm minicpm3 minimax minimax_m2 minimax_m3 minimax_m3_vl_text mistral4 mpt mt5 "
    "nemotron nemotron-nas nemotron_h olmo olmo2 olmoe openelm orion paddleocr_vl_text phi qwen qwen3_5_moe_text "
    "qwen3_5_text qwen3_next qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text rwkv6 seed_oss solar_open stablelm "
    "t5 umt5 xverse youtu"
).split()

# Types for whose architecture no class is registered in conversion/.
_NOT_CONVERTED = (
    "aquila aria_text axk1 axk2 bart beam biogpt codegen cohere_compass_text ctrl cwm diffllama doge emu3_text_model "
    "flex_olmo flint git gpt_neo gpt_neox_japanese gptj helium hyperclovax internlm jetmoe kolibri1 lfm3 longcat_flash "
    "m2m_100 marian mbart mimo mllama_text_model molmo2_text nanochat olmo_hybrid opt pegasus persimmon phi3_v phi4mm "
    "recurrent_gemma rwkv telechat vaultgemma whisper xglm zamba zamba2"
).split()

# EXAONE 4 keeps windows only in the model with 64 layers (models/exaone4.cpp).
_EXAONE4_LAYERS = 64


def keeps_windows(spec: ModelSpec) -> bool:
    """Whether windows have a separate cache.

    Raises ModelError (exit 3) for a type that llama.cpp does not convert, for windows that are not modelled, and if
    the model has windows in more or fewer layers than llama.cpp's architecture.
    """
    kind = spec.model_type
    windowed = [
        any(cache.window is not None for cache in group.caches)
        for group in spec.layers
        for _ in range(group.num_layers)
    ]
    if kind == "exaone4":
        return spec.num_layers == _EXAONE4_LAYERS and any(windowed)
    if kind in _NOT_CONVERTED:
        raise ModelError(f"{spec.name}: llama.cpp does not convert {kind}", "count with --engine logical")
    if kind not in (*_LISTED, *_RULED, *_FULL_LENGTH, *_PLAIN):
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} is not modelled")
    if not any(windowed):
        return False
    if kind in _PLAIN:
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} with windows is not modelled")
    pattern = (_RULED[kind] or row(kind)["slides"]) if kind in _RULED else None
    # The bytes depend on how many layers have windows, not on which. A GGUF file is already read by the same rule.
    if pattern and spec.gguf is None and sum(windowed) != sum(pattern.sliding(len(windowed))):
        which = "first" if pattern.full_first else "last"
        raise ModelError(
            f"{spec.name}: llama.cpp's {kind} has full attention in the {which} of every {pattern.step} layers and "
            f"ignores the config; the model has {sum(windowed)} layers with windows"
        )
    return pattern is not None or kind in _LISTED
