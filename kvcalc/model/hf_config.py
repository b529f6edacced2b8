"""A config mapping, under the published config.json's own key names, becomes a ModelSpec.

One way in for presets, config.json files and flags alike. The model_type picks the family's reader; an unknown type is
refused, and so is an unknown key of a known type whose name says that it changes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvcalc.errors import ModelError, nearest
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

# model_type -> module in kvcalc.model.families. Modules are imported when asked for: start-up pays for one.
FAMILIES: dict[str, str] = {
    "axk1": "deepseek",
    "axk2": "deepseek",
    "bamba": "mamba_hybrids",
    "bart": "encoder_decoder",
    "codegen": "renamed",
    "ctrl": "renamed",
    "dbrx": "mosaic",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "deepseek_v4": "deepseek_v4",
    "falcon": "falcon",
    "falcon_h1": "mamba_hybrids",
    "falcon_mamba": "mamba",
    "gemma3n_text": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm4_moe_lite": "deepseek",
    "glm_moe_dsa": "deepseek",
    "gpt-sw3": "gpt2",
    "gpt2": "gpt2",
    "gpt_bigcode": "renamed",
    "gpt_neo": "gpt_neo",
    "gptj": "renamed",
    "granitemoehybrid": "mamba_hybrids",
    "hy_v4": "deepseek",
    "jamba": "mamba_hybrids",
    "jetmoe": "jetmoe",
    "kimi_k2": "deepseek",
    "kimi_linear": "kimi_linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "lfm3": "lfm2",
    "llama4_text": "llama4",
    "longcat_flash": "deepseek",
    "m2m_100": "encoder_decoder",
    "mamba": "mamba",
    "mamba2": "mamba",
    "marian": "encoder_decoder",
    "mbart": "encoder_decoder",
    "mimo_v2_flash": "mimo",
    "minicpm3": "deepseek",
    "minimax": "minimax",
    "minimax_m3_vl_text": "minimax_m3",
    "mistral4": "deepseek",
    "mllama_text_model": "mllama",
    "modernbert-decoder": "modernbert_decoder",
    "mpt": "mosaic",
    "mt5": "encoder_decoder",
    "nemotron_h": "nemotron_h",
    "olmo_hybrid": "gated_delta",
    "pegasus": "encoder_decoder",
    "qwen3_5_moe_text": "gated_delta",
    "qwen3_5_text": "gated_delta",
    "qwen3_next": "gated_delta",
    "recurrent_gemma": "recurrent_gemma",
    "rwkv": "rwkv",
    "rwkv6": "rwkv",
    "step3p5": "step",
    "t5": "encoder_decoder",
    "umt5": "encoder_decoder",
    "whisper": "encoder_decoder",
    "xglm": "renamed",
    "youtu": "deepseek",
    "zamba": "zamba",
    "zamba2": "zamba",
    **dict.fromkeys(
        (
            "albert bert bert-generation camembert data2vec-text deberta deberta-v2 distilbert electra "
            "ernie git megatron-bert mpnet nomic_bert rembert roberta roberta-prelayernorm roformer "
            "xlm-roberta xlm-roberta-xl xmod"
        ).split(),
        "bert",
    ),
    **dict.fromkeys(
        (
            "afmoe apertus arcee aria_text beam biogpt bitnet bloom chameleon cohere cohere2 cohere2_moe "
            "cohere_compass_text cosmos3_edge_text cwm deepseek_ocr2_text diffllama doge dots1 emu3_text_model "
            "ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone4 exaone_moe flex_olmo flint gemma gemma2 "
            "gemma3_text generic glm glm4 glm4_moe glm4v_moe_text glm4v_text glm_ocr_text gpt_neox "
            "gpt_neox_japanese gpt_oss granite granite4_vision_text granite_docling_text granite_swa granitemoe "
            "granitemoe_swa granitemoeshared helium higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe "
            "hunyuan_vl_text hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo "
            "minimax_m2 ministral ministral3 mistral mixtral molmo2_text muse_glimmer_text muse_spark_text "
            "nanochat nemotron olmo olmo2 olmo3 olmoe opt paddleocr_vl_text persimmon phi phi3 phi4_multimodal "
            "phimoe qwen2 qwen2_5_omni_text qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe "
            "qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm starcoder2 "
            "vaultgemma"
        ).split(),
        "decoder",
    ),
}

# Keys which say nothing of the cache, whatever the family. Of others, a preset holds only those in the family's KEYS.
COMMON_KEYS = frozenset(
    (
        "model_type torch_dtype dtype quantization_config vocab_size intermediate_size hidden_act "
        "tie_word_embeddings max_position_embeddings"
    ).split()
)

# Names under which published configs have put facts about the cache. A key like these which the family's reader does
# not know, with a value that is not null, false or empty, may change the bytes: better no answer than a wrong one.
# Plain substrings: a regular expression would be compiled at every start.
_CACHE_LIKE = (
    "window lora_rank head_dim num_kv num_key_v kv_head kv_shared shared_kv kv_share kv_channel layer_types "
    "attention_types attention_layers attention_chunk attn_layer index_ sparse compress multi_query _conv_ "
    "conv_ ssm state_size mamba linear_ block_configs cross_attention hybrid use_cla use_mla per_layer_config "
    "local_attention global_attn"
).split()


def read_config(config: Mapping[str, object], name: str, source: str, *, strict: bool = False) -> ModelSpec:
    """The ModelSpec of a config mapping. `name` and `source` say where it came from.

    `strict` refuses every key the family does not know, cache or not: presets hold facts, so a misspelt key is a lost
    one. Raises ModelError (exit 3) for an unknown model_type, a missing fact, or a key which may change the cache.
    """
    outer = ConfigReader(config, name, source).text("model_type")
    if outer in FAMILIES:
        return _read(config, outer, FAMILIES[outer], name, source, strict)
    # What few models need is imported for these alone: start-up pays for it.
    from kvcalc.model.remote_code import REMOTE_FAMILIES
    from kvcalc.model.wrappers import REMOTE_WRAPPERS, WRAPPERS, language_model

    config, model_type = language_model(config, outer, name)
    module = FAMILIES.get(model_type) or REMOTE_FAMILIES.get(model_type)
    if module is None:
        known = (*FAMILIES, *REMOTE_FAMILIES, *WRAPPERS)
        hint = nearest(model_type, known) or f"{len(known)} types are known; a plain decoder may be called generic"
        raise ModelError(f"{name}: model_type {model_type!r} is not known", hint)
    spec = _read(config, model_type, module, name, source, strict)
    is_remote = model_type in REMOTE_FAMILIES or outer in REMOTE_WRAPPERS
    return spec._replace(in_transformers=False) if is_remote else spec


def _read(
    config: Mapping[str, object], model_type: str, module: str, name: str, source: str, strict: bool
) -> ModelSpec:
    family = import_module(f"kvcalc.model.families.{module}")
    _refuse_unknown_keys(config, family.KEYS | COMMON_KEYS, name, model_type, strict)
    spec: ModelSpec = family.read(ConfigReader(config, name, source), model_type)
    return spec


def _refuse_unknown_keys(
    config: Mapping[str, object], known: frozenset[str], name: str, model_type: str, strict: bool
) -> None:
    for key, value in config.items():
        if key in known:
            continue
        if strict:
            raise ModelError(f"{name}: {key!r} is not a key of model_type {model_type}", nearest(key, known))
        if value not in (None, False, "", [], {}) and any(part in key for part in _CACHE_LIKE):
            hint = "kvcalc refuses rather than guess; remove the key if it is known to change nothing"
            raise ModelError(f"{name}: {key!r} may change the cache and {model_type}'s reader does not know it", hint)
