"""Models that wrap a language model: the key of the inner config, and its type if the inner config does not state one.

Source: sub_configs_defaults of the configuration classes of Transformers 5.23.0, unless another source is named.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.records import NamedTuple

# Published flat: the keys of the language model are on the same level as those of the vision tower, and Transformers'
# class reads them there. Configs that mlx-lm converts may be flat for other types, too.
_FLAT = ("dots3_note", "glm5_next", "qwen2_vl", "qwen2_5_vl")

# Keys that an inner config inherits from the outer one if it does not state them.
_INHERITED = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")


# Only the outer config decides whether the embedding is also the head. The inner config may state something else, which
# is ignored, because these language models exist only inside such wrappers. Source: Qwen3VLConfig and
# Qwen3VLMoeConfig, Transformers 5.23.0.
_TIED_OUTSIDE = ("qwen3_vl", "qwen3_vl_moe")


# Types under which language models were published first. Source: Exaone4_5Config, Transformers 5.23.0.
_RENAMED = {"exaone4_5_text": "exaone4"}


class Wrapper(NamedTuple):
    """A model around a language model.

    `inner` is the language model's type if its config does not state one; None means that the config must state it.
    `keys` is the path to the inner config. `forced`: the type is `inner`, whatever the inner config states.
    """

    inner: str | None
    keys: tuple[str, ...] = ("text_config",)
    forced: bool = False


# "outer=inner": wrappers that have their language model under text_config.
_TEXT = (
    "aria=aria_text audioflamingo3=qwen2 aya_vision=cohere2 blip-2=opt blip=blip_text_model cohere2_vision=cohere2 "
    "cohere_compass=cohere_compass_text cosmos3_edge=cosmos3_edge_text cosmos3_omni=qwen3_vl_text "
    "deepseek_ocr2=deepseek_ocr2_text deepseek_vl=llama deepseek_vl_hybrid=llama diffusion_gemma=diffusion_gemma_text "
    "dots3_note=dots3_note_text emu3=emu3_text_model ernie4_5_vl_moe=ernie4_5_vl_moe_text exaone4_5=exaone4 "
    "fast_vlm=qwen2 florence2=bart fun_asr_nano=qwen3 fuyu=persimmon gemma3=gemma3_text gemma3n=gemma3n_text "
    "gemma4=gemma4_text gemma4_unified=gemma4_unified_text glm46v=glm4v_text glm4v=glm4v_text "
    "glm4v_moe=glm4v_moe_text glm5_next=glm5_next_text glm_ocr=glm_ocr_text glmasr=llama glmga=glm4v_text "
    "got_ocr2=qwen2 granite4_vision=granite4_vision_text granite_docling=granite_docling_text granite_speech=granite "
    "granite_speech_plus=granite hunyuan_vl=hunyuan_vl_text hyperclovax_vision_v2=hyperclovax idefics2=mistral "
    "idefics3=llama inkling2=inkling2_text inkling_mm_model=inkling_text instructblip=opt instructblipvideo=opt "
    "internvl=qwen2 janus=llama kimi_k25=deepseek_v3 kosmos-2.5=kosmos_2_5_text_model kosmos-2=kosmos_2_text_model "
    "lfm2_vl=lfm2 lfm3_vl=lfm3 lighton_ocr=qwen3 llama4=llama4_text llava=llama llava_next=llama "
    "llava_next_video=llama llava_onevision=qwen2 minicpm_ocr=qwen3_5_text minicpmv4_6=qwen3_5_text "
    "minicpmv4_7=qwen3_5_text minimax_m3_vl=minimax_m3_vl_text mistral3=mistral mistral_large4=mistral_large4_text "
    "mllama=mllama_text_model molmo2=molmo2_text moss_transcribe_diarize=qwen3 muse_glimmer=muse_glimmer_text "
    "muse_spark=muse_spark_text musicflamingo=qwen2 nemo_speechlm=nemotron_h nemotron_h_omni=nemotron_h ovis2=qwen2 "
    "paddleocr_vl=paddleocr_vl_text paligemma=gemma perception_lm=llama pix2struct=pix2struct_text_model "
    "pp_chart2table=qwen2 pp_formulanet=pp_formulanet_text qianfan_ocr=qwen3 qwen2_5_omni_thinker=qwen2_5_omni_text "
    "qwen2_5_vl=qwen2_5_vl_text qwen2_audio=qwen2 qwen2_vl=qwen2_vl_text qwen3_5=qwen3_5_text "
    "qwen3_5_moe=qwen3_5_moe_text qwen3_asr=qwen3 qwen3_omni_moe_thinker=qwen3_omni_moe_text qwen3_vl=qwen3_vl_text "
    "qwen3_vl_moe=qwen3_vl_moe_text qwen4_exp=qwen4_exp_text shieldgemma2=gemma3_text smolvlm=llama "
    "unlimited_ocr=unlimited_ocr_text vibevoice=qwen2 vibevoice_asr=qwen2 video_llama_3=qwen2 video_llava=llama "
    "vipllava=llama voxtral=llama voxtral_realtime=voxtral_realtime_text"
)

# The same, with the language model under another key.
_DECODER = (
    "canary=canary_decoder:decoder_config dia=dia_decoder:decoder_config musicgen=musicgen_decoder:decoder "
    "musicgen_melody=musicgen_melody_decoder:decoder t5gemma=t5_gemma_module:decoder t5gemma2=t5gemma2_decoder:decoder"
)

_TRANSFORMERS: dict[str, Wrapper] = {
    **{
        outer: Wrapper(inner.split(":")[0], (inner.split(":")[1],))
        for outer, _, inner in (pair.partition("=") for pair in _DECODER.split())
    },
    **{outer: Wrapper(inner) for outer, _, inner in (pair.partition("=") for pair in _TEXT.split())},
    # The thinker is the language model. The talker, which produces speech, has its own cache and is not counted.
    "qwen2_5_omni": Wrapper("qwen2_5_omni_text", ("thinker_config", "text_config")),
    "qwen3_omni_moe": Wrapper("qwen3_omni_moe_text", ("thinker_config", "text_config")),
    # Its class ignores the published inner model_type, which refers to the code published with the model.
    "step3p7": Wrapper("step3p5", forced=True),
}

# Published with their own code. Sources: moonshotai/Kimi-K3, moonshotai/Kimi-VL-A3B-Instruct, microsoft/maira-2,
# OpenGVLab/InternVL2-8B, deepseek-ai/deepseek-vl2, deepseek-ai/Janus-Pro-7B, nvidia/NVLM-D-72B and
# h2oai/h2ovl-mississippi-2b; Step3VLConfig and Step5VLConfig of vLLM 0.33.0; and the classes of vLLM 0.33.0 for the
# others (for example dots_ocr.py and keye.py in model_executor/models, which begin their language models as Qwen2 and
# Qwen3). MiniCPM-V and MiniCPM-o are flat, and their version decides (`_minicpm`).
REMOTE_WRAPPERS: dict[str, Wrapper] = {
    "Keye": Wrapper("qwen3"),
    "Llama_Nemotron_Nano_VL": Wrapper("llama", ("llm_config",)),
    "NVLM_D": Wrapper(None, ("llm_config",)),
    "NemotronH_Nano_Omni_Reasoning_V3": Wrapper("nemotron_h", ("llm_config",)),
    "NemotronH_Nano_VL_V2": Wrapper("nemotron_h", ("llm_config",)),
    "deepseek_vl_v2": Wrapper("deepseek_v2", ("language_config",)),
    "dots_ocr": Wrapper("qwen2"),
    "h2ovl_chat": Wrapper(None, ("llm_config",)),
    "interns1": Wrapper(None),
    "internvl_chat": Wrapper(None, ("llm_config",)),
    "kimi_audio": Wrapper("qwen2"),
    "kimi_k3": Wrapper("kimi_linear"),
    "kimi_vl": Wrapper("deepseek_v3"),
    "maira2": Wrapper(None),
    "minicpmo": Wrapper("qwen2"),
    "minicpmv": Wrapper("llama"),
    "multi_modality": Wrapper("llama", ("language_config",)),
    "opencua": Wrapper(None),
    "openvla": Wrapper("llama"),
    "ovis": Wrapper(None, ("llm_config",)),
    "ovis2_5": Wrapper(None, ("llm_config",)),
    "skywork_chat": Wrapper(None, ("llm_config",)),
    "step3_vl": Wrapper("step3_text"),
    "step5_vl": Wrapper("step5"),
}

WRAPPERS: dict[str, Wrapper] = {**_TRANSFORMERS, **REMOTE_WRAPPERS}

# The default hidden_size, num_hidden_layers and num_attention_heads of the configuration classes. An inner config may
# state only its differences from the class, so even the model's size can be missing (llava-1.5-7b). Other configs must
# state these keys.
INNER_SIZES: dict[str, tuple[int, int, int]] = {
    "aria_text": (4096, 32, 32), "cohere2": (8192, 40, 64), "cohere_compass_text": (8192, 40, 64),
    "cosmos3_edge_text": (2048, 28, 16), "deepseek_ocr2_text": (4096, 32, 32), "deepseek_v3": (7168, 61, 128),
    "emu3_text_model": (4096, 32, 32), "ernie4_5": (1024, 18, 16), "ernie4_5_vl_moe_text": (2560, 28, 20),
    "exaone4": (4096, 32, 32), "gemma": (3072, 28, 16), "gemma2": (2304, 26, 8), "gemma3_text": (2304, 26, 8),
    "gemma3n_text": (2048, 35, 8), "gemma4_text": (2304, 30, 8), "gemma4_unified_text": (2304, 30, 8),
    "glm4v_moe_text": (4096, 46, 96), "glm4v_text": (4096, 40, 32), "glm_ocr_text": (1024, 16, 16),
    "gpt_oss": (2880, 36, 64), "granite": (4096, 32, 32), "granite4_vision_text": (4096, 32, 32),
    "granite_docling_text": (1024, 28, 16), "hunyuan_vl_text": (4096, 32, 32), "hyperclovax": (4096, 32, 32),
    "internlm3": (4096, 48, 32), "llama": (4096, 32, 32), "llama4_text": (5120, 48, 40), "mistral": (4096, 32, 32),
    "mixtral": (4096, 32, 32), "molmo2_text": (4096, 36, 32), "muse_glimmer_text": (6656, 52, 32),
    "muse_spark_text": (8192, 62, 128), "opt": (768, 12, 12), "paddleocr_vl_text": (1024, 18, 16),
    "persimmon": (4096, 36, 64), "phi3": (3072, 32, 32), "qwen2": (4096, 32, 32), "qwen2_5_omni_text": (3584, 28, 28),
    "qwen2_5_vl_text": (8192, 80, 64), "qwen2_moe": (2048, 24, 16), "qwen2_vl_text": (8192, 80, 64),
    "qwen3": (4096, 32, 32), "qwen3_5_moe_text": (2048, 40, 16), "qwen3_5_text": (4096, 32, 16),
    "qwen3_moe": (2048, 24, 32), "qwen3_omni_moe_text": (2048, 28, 28), "qwen3_vl_moe_text": (2048, 24, 16),
    "qwen3_vl_text": (4096, 32, 32), "step3p5": (4096, 45, 64),
}  # fmt: skip


def is_flat(config: Mapping[str, object], outer: str) -> bool:
    """Return whether the keys of the language model are on the same level as the wrapper's own."""
    wrapper = WRAPPERS.get(outer)
    return bool(
        wrapper and wrapper.inner and config.get(wrapper.keys[0]) is None and config.get("num_hidden_layers")
    )  # fmt: skip


# The language models of MiniCPM-V and MiniCPM-o by version. Source: _SUPPORT_VERSION of minicpmv.py and of minicpmo.py,
# model_executor/models, vLLM 0.33.0; without a version, get_version_by_config.
_MINICPM = {"2.0": "minicpm", "2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}


def _minicpm(config: Mapping[str, object], name: str) -> str:
    """The type of the language model in a flat config of MiniCPM-V or MiniCPM-o."""
    oldest = "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
    version = config.get("version", oldest)
    found = _MINICPM.get(str(version))
    if found is None:
        raise ModelError(f"{name}: version {str(version)[:40]!r} of MiniCPM-V is not known", ", ".join(_MINICPM))
    return found


def without_flat_keys(config: Mapping[str, object], outer: str) -> Mapping[str, object] | None:
    """Return the wrapper that Transformers' class makes of a flat config; None if that reads the keys, too.

    Most classes take a missing inner config as the defaults of its class, and ignore the other keys.
    """
    if not is_flat(config, outer) or outer in _FLAT or outer in REMOTE_WRAPPERS:
        return None
    wrapper = WRAPPERS[outer]
    inner: Mapping[str, object] = {}
    for key in reversed(wrapper.keys):
        inner = {key: inner}
    return {"model_type": outer, **{key: config[key] for key in _INHERITED if key in config}, **inner}


def language_model(
    config: Mapping[str, object], outer: str, name: str, *, reads_outer: bool
) -> tuple[Mapping[str, object], str]:
    """Return the config of the language model inside a config of type `outer`, and its type.

    If `outer` is not a wrapper, both are returned unchanged. `reads_outer`: `outer` is also the type of a language
    model, which is published flat. Raises ModelError (exit 3) if the inner config is missing, is not an object, or has
    no type.
    """
    wrapper = WRAPPERS.get(outer)
    if wrapper is None:
        return config, outer
    if config.get(wrapper.keys[0]) is None and reads_outer:
        return config, outer
    if is_flat(config, outer):
        chosen = _minicpm(config, name) if outer in ("minicpmo", "minicpmv") else str(wrapper.inner)
        return {**config, "model_type": chosen}, chosen
    found = config
    own: Mapping[str, object] = {}
    for key in wrapper.keys:
        inner = found.get(key)
        if inner is None:
            raise ModelError(f"{name}: {key} is missing: {outer} has its language model there")
        if not isinstance(inner, Mapping):
            raise ModelError(f"{name}: {key} must be an object")
        own = inner
        found = {**{inherited: found[inherited] for inherited in _INHERITED if inherited in found}, **inner}
    stated = found.get("model_type")
    model_type = wrapper.inner if wrapper.forced or stated in (None, "", outer) else stated
    model_type = _RENAMED.get(str(model_type), model_type)
    if not isinstance(model_type, str):
        raise ModelError(f"{name}: {wrapper.keys[-1]}.model_type is missing or not a string")
    sizes = INNER_SIZES.get(model_type)
    defaults = dict(zip(("hidden_size", "num_hidden_layers", "num_attention_heads"), sizes)) if sizes else {}
    tied: dict[str, object] = {}
    if outer in _TIED_OUTSIDE and own.get("tie_word_embeddings") is not None:
        tied = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    return {**defaults, **found, **tied, "model_type": model_type}, model_type
