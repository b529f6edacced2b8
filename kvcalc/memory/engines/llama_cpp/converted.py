"""Which model types llama.cpp converts, and what its files and its cache know of their windows.

Source: the classes registered in conversion/ and load_arch_hparams of src/models, as they stand in llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.families.decoder_table import DECODERS
from kvcalc.model.families.window_patterns import OneFullIn, full_every, full_first_of
from kvcalc.model.spec import ModelSpec

# A second cache for windows (swa_type). The file lists the layers that have them.
_LISTED = (
    "cohere2_moe exaone_moe gemma3n_text gemma4_text gemma4_unified_text granite_swa granitemoe_swa mellum "
    "mimo_v2_flash muse_glimmer_text olmo3 step3p5 step3p7"
).split()

# The same, but which layers have them is the architecture's own rule (load_swa_pattern) and not in the file: the
# model's own where its config need not list them, and llama.cpp's for those whose configs do.
_RULED: dict[str, OneFullIn] = {
    **{kind: DECODERS[kind]["slides"] for kind in ("afmoe", "cohere2", "gemma2", "gemma3_text", "gpt_oss")},
    "laguna": full_first_of(4), "llama4_text": full_every(4),
}  # fmt: skip

# Their windows are not kept as such: every token has its cell.
_FULL_LENGTH = (
    "dots1 ministral3 mistral mixtral phi3 phi4 phimoe qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text "
    "qwen3 qwen3_moe smollm3 starcoder2"
).split()

# Windows are not read at all: a model of these types with one is refused.
_PLAIN = (
    "apertus arcee arctic baichuan bailing_moe bamba bitnet bloom chameleon chatglm cohere dbrx deepseek deepseek_v2 "
    "deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe exaone falcon falcon_h1 falcon_mamba gemma generic glm glm4 "
    "glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_moe_dsa glm_ocr_text gpt2 gpt_bigcode gpt_neox granite "
    "granitemoe granitemoehybrid granitemoeshared grok-1 hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v3 hy_v4 "
    "internlm2 internlm3 iquestcoder jais jais2 jamba kimi_k2 kimi_linear lfm2 lfm2_moe llama llava mamba mamba2 "
    "minicpm minicpm3 minimax minimax_m2 minimax_m3 minimax_m3_vl_text mistral4 mpt mt5 nemotron nemotron-nas "
    "nemotron_h olmo olmo2 olmoe openelm orion paddleocr_vl_text phi qwen qwen3_5_moe_text qwen3_5_text qwen3_next "
    "qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text rwkv6 seed_oss solar_open stablelm t5 umt5 xverse youtu"
).split()

# No class in conversion/ is registered for the architecture their configs name.
_NOT_CONVERTED = (
    "aquila aria_text axk1 axk2 bart beam biogpt codegen cohere_compass_text ctrl cwm diffllama doge emu3_text_model "
    "flex_olmo flint git gpt_neo gpt_neox_japanese gptj helium hyperclovax internlm jetmoe kolibri1 lfm3 longcat_flash "
    "m2m_100 marian mbart mimo mllama_text_model molmo2_text nanochat olmo_hybrid opt pegasus persimmon phi3_v phi4mm "
    "recurrent_gemma rwkv telechat vaultgemma whisper xglm zamba zamba2"
).split()

# EXAONE 4 keeps windows in the model of 64 layers alone (models/exaone4.cpp).
_EXAONE4_LAYERS = 64


def keeps_windows(spec: ModelSpec) -> bool:
    """Whether windows have a cache of their own.

    Raises ModelError (exit 3) for a type llama.cpp does not convert, for windows whose treatment is not established,
    and for windows in more or fewer layers than the architecture has them.
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
        raise ModelError(f"{spec.name}: llama.cpp converts no {kind}", "count with --engine logical")
    if kind not in (*_LISTED, *_RULED, *_FULL_LENGTH, *_PLAIN):
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} is not established")
    if not any(windowed):
        return False
    if kind in _PLAIN:
        raise ModelError(f"{spec.name}: llama.cpp's layout of {kind} with windows is not established")
    pattern = _RULED.get(kind)
    # How many have windows makes the bytes, not which. A GGUF file is read by the same rule already.
    if pattern and spec.gguf is None and sum(windowed) != sum(pattern.sliding(len(windowed))):
        which = "first" if pattern.full_first else "last"
        raise ModelError(
            f"{spec.name}: llama.cpp's {kind} sees all in the {which} of every {pattern.step} layers, whatever the "
            f"config says; the model has {sum(windowed)} layers with windows"
        )
    return pattern is not None or kind in _LISTED
