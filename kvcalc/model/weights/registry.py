"""Which module counts which family's weights."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.tensors import ModelWeights

# model_type -> module beside this one. A type which is not here is not counted: no number rather than a guess.
# `generic` is not: what is known of it names no norms, biases or vocabulary. Nor is longcat_flash: the count of
# Transformers 5.23.0 holds matrices for experts which compute nothing, the published one does not.
COUNTERS: dict[str, str] = {
    **dict.fromkeys("bamba falcon_h1 granitemoehybrid jamba".split(), "mamba_hybrids"),
    **dict.fromkeys("codegen gpt_bigcode gptj opt".split(), "gptj"),
    **dict.fromkeys("dbrx mpt".split(), "mosaic"),
    **dict.fromkeys("falcon_mamba mamba mamba2".split(), "mamba"),
    **dict.fromkeys("lfm2 lfm2_moe".split(), "lfm2"),
    **dict.fromkeys("mt5 t5 umt5".split(), "t5"),
    **dict.fromkeys("bart m2m_100 marian mbart pegasus whisper".split(), "bart"),
    "bert": "classic",
    "bloom": "classic",
    "deepseek_v4": "deepseek_v4",
    "falcon": "falcon",
    "gpt2": "classic",
    "gpt_neox": "classic",
    "gemma3n_text": "gemma4",
    "gemma4_text": "gemma4",
    "kimi_linear": "kimi_linear",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo",
    "minimax": "minimax",
    "minimax_m3": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
    "mllama_text_model": "mllama",
    "nemotron_h": "nemotron_h",
    **dict.fromkeys("qwen3_5_moe_text qwen3_5_text qwen3_next".split(), "gated_delta"),
    **dict.fromkeys(
        "deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 minicpm3".split(), "latent"
    ),
    **dict.fromkeys(
        (
            "apertus arcee cohere cohere2 cwm dots1 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 glm4_moe "
            "gpt_oss granite granitemoe helium hunyuan_v1_dense llama llava mimo minimax_m2 ministral3 mistral "
            "mixtral nemotron olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text "
            "qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 solar_open stablelm "
            "starcoder2 vaultgemma"
        ).split(),
        "decoder",
    ),
}


def read_weights(config: Mapping[str, object], model_type: str, name: str) -> ModelWeights | None:
    """The weights of the language model `config` describes, under the published config.json's own keys.

    A key left out has the value Transformers' configuration class gives it. None where the family is not counted.
    Raises ModelError (exit 3) for a missing fact, or a key which changes the weights in a way that is not modelled.
    """
    module = COUNTERS.get(model_type)
    if module is None:
        return None
    family = import_module(f"kvcalc.model.weights.{module}")
    weights: ModelWeights = family.weights(ConfigReader(config, name, name), model_type)
    return weights
