"""A config mapping, under the published config.json's own key names, becomes a ModelSpec.

One way in for presets, config.json files and flags alike. The model_type picks the family's reader; an unknown type is
refused, and so is an unknown key of a known type whose name says that it changes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvcalc.errors import ModelError, nearest
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

# model_type -> module in kvcalc.model.families, for all but plain decoders, which are rows of `decoder_table`. Modules
# are imported when asked for: start-up pays for one.
FAMILIES: dict[str, str] = {
    "dbrx": "mosaic",
    "deepseek_v4": "deepseek_v4",
    "falcon": "multi_query",
    "gpt_bigcode": "multi_query",
    "gpt_neo": "gpt_neo",
    "jetmoe": "jetmoe",
    "kimi_linear": "kimi_linear",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo",
    "minimax": "minimax",
    "minimax_m3_vl_text": "minimax_m3",
    "mllama_text_model": "mllama",
    "modernbert-decoder": "modernbert_decoder",
    "mpt": "mosaic",
    "nemotron_h": "nemotron_h",
    "opt": "opt",
    "recurrent_gemma": "recurrent_gemma",
    "step3p5": "step",
    **dict.fromkeys("bamba falcon_h1 granitemoehybrid jamba".split(), "mamba_hybrids"),
    **dict.fromkeys("bart m2m_100 marian mbart mt5 pegasus t5 umt5 whisper".split(), "encoder_decoder"),
    **dict.fromkeys("falcon_mamba mamba mamba2".split(), "mamba"),
    **dict.fromkeys("gemma3n_text gemma4_text gemma4_unified_text".split(), "gemma4"),
    **dict.fromkeys("lfm2 lfm2_moe lfm3".split(), "lfm2"),
    **dict.fromkeys("olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next".split(), "gated_delta"),
    **dict.fromkeys("rwkv rwkv6".split(), "rwkv"),
    **dict.fromkeys("zamba zamba2".split(), "zamba"),
    **dict.fromkeys(
        (
            "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 kimi_k2 longcat_flash "
            "minicpm3 mistral4 youtu"
        ).split(),
        "deepseek",
    ),
    **dict.fromkeys(
        (
            "albert bert bert-generation camembert data2vec-text deberta deberta-v2 distilbert electra "
            "ernie git megatron-bert mpnet nomic_bert rembert roberta roberta-prelayernorm roformer "
            "xlm-roberta xlm-roberta-xl xmod"
        ).split(),
        "bert",
    ),
}

# Of these, types published with code of their own, which Transformers has no class for: the formula counts them as any
# other; what Transformers' cache would hold is not known. "deepseek_ref" is the name SGLang's converted checkpoints of
# DeepSeek-V4 give the reference code.
REMOTE_FAMILIES: dict[str, str] = {
    "chatglm": "multi_query",
    "deci": "nas",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3",
    "nemotron-nas": "nas",
    "openelm": "openelm",
    "step3p7": "step",
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
    module = _module_of(outer)
    if outer in FAMILIES or (module is not None and not is_remote(outer)):
        return _read(config, outer, str(module), name, source, strict)
    # What few models need is imported for these alone: start-up pays for it.
    from kvcalc.model.wrappers import REMOTE_WRAPPERS, WRAPPERS, language_model

    config, model_type = language_model(config, outer, name, reads_outer=module is not None)
    module = _module_of(model_type)
    if module is None:
        known = (*known_types(), *WRAPPERS)
        hint = nearest(model_type, known) or f"{len(known)} types are known; a plain decoder may be called generic"
        raise ModelError(f"{name}: model_type {model_type!r} is not known", hint)
    spec = _read(config, model_type, module, name, source, strict)
    return spec._replace(in_transformers=False) if is_remote(model_type) or outer in REMOTE_WRAPPERS else spec


def known_types() -> list[str]:
    """Every model_type that is read, wrappers not included."""
    return [*FAMILIES, *REMOTE_FAMILIES, *_decoders()]


def is_remote(model_type: str) -> bool:
    """Whether models of this type are published with code of their own."""
    return model_type in REMOTE_FAMILIES or bool(_decoders().get(model_type, {}).get("is_remote"))


def _decoders() -> Mapping[str, Mapping[str, Any]]:
    from kvcalc.model.families.decoder_table import DECODERS

    return DECODERS


def _module_of(model_type: str) -> str | None:
    found = FAMILIES.get(model_type) or REMOTE_FAMILIES.get(model_type)
    return found or ("decoder" if model_type in _decoders() else None)


def _read(
    config: Mapping[str, object], model_type: str, module: str, name: str, source: str, strict: bool
) -> ModelSpec:
    family = import_module(f"kvcalc.model.families.{module}")
    keys = family.KEYS if hasattr(family, "KEYS") else family.known_keys(model_type)
    _refuse_unknown_keys(config, keys | COMMON_KEYS, name, model_type, strict)
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
