"""What sets one plain decoder family apart from another: defaults of keys its published configs leave out, and which
layers have a window.

Read from the configuration classes of Transformers 5.23.0, whose saved configs hold only what differs from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.model.families import window_patterns as pattern

_NOTHING: Mapping[str, object] = {}
_NONE_REFUSED: Mapping[str, str] = {}


class Rule(NamedTuple):
    """A family's own facts.

    `slides`: which layers have the window, where there is one; None where a window is an error. `switch`: only
    use_sliding_window turns it on. `has_layer_types`: the config may list the kinds itself. `keys`: keys of this family
    alone which look as if they changed the cache. `grouped`: False where every query head has its own K and V, whatever
    the config says. `states_kv_heads`: the config must give num_key_value_heads. `derives_head_dim`: a head is always
    hidden_size / num_attention_heads wide.
    """

    slides: pattern.Pattern | None = None
    switch: bool = False
    has_layer_types: bool = False
    defaults: Mapping[str, object] = _NOTHING
    refused: Mapping[str, str] = _NONE_REFUSED
    qkv_bias: bool = False
    rotary: bool = True
    keys: tuple[str, ...] = ()
    grouped: bool = True
    states_kv_heads: bool = False
    derives_head_dim: bool = False


_BIDIRECTIONAL: Mapping[str, str] = {"use_bidirectional_attention": "an encoder's window is cut in half; not modelled"}
_PLAIN = Rule()
# No keys for fewer K and V heads than query heads.
_MULTI_HEAD = Rule(grouped=False, derives_head_dim=True)
# Published configs repeat head_dim as attention_head_dim.
_HUNYUAN = Rule(keys=("attention_head_dim",))
# The config must state num_key_value_heads: what its class would fill in is not known here.
_STATED = Rule(states_kv_heads=True)


def _kv(num_kv_heads: int, head_dim: int | None = None, **more: object) -> dict[str, object]:
    """Defaults of num_key_value_heads, head_dim and more."""
    return {"num_key_value_heads": num_kv_heads, **({} if head_dim is None else {"head_dim": head_dim}), **more}


_ALL = pattern.all_layers
_LISTED = pattern.no_layers
# Gemma 3 and EXAONE state the step under a key, the others do not.
_STEP_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")
# Qwen's window: off unless switched on, and then from max_window_layers on.
_QWEN_LAYERS = pattern.from_max_window_layers
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}
_QWEN_VL = Rule(_QWEN_LAYERS, True, True, _kv(8, sliding_window=4096, max_window_layers=80), qkv_bias=True)

RULES: dict[str, Rule] = {
    "generic": Rule(_ALL),
    "llama": _PLAIN,
    "mistral": Rule(_ALL, defaults=_kv(8, sliding_window=4096)),
    "mixtral": Rule(_ALL, defaults=_kv(8)),
    "ministral": Rule(_ALL, False, True, _kv(8, sliding_window=4096)),
    "ministral3": Rule(_ALL, defaults=_kv(8, 128)),
    "starcoder2": Rule(_ALL, defaults=_kv(2)),
    "phi": _PLAIN,
    "phi3": Rule(_ALL),
    "phi4_multimodal": Rule(_ALL, defaults=_kv(8)),
    "phimoe": Rule(_ALL, defaults=_kv(8)),
    "qwen2": Rule(_QWEN_LAYERS, True, True, _kv(32, **_QWEN_WINDOW), qkv_bias=True),
    # Qwen2 with a layer for the next tokens beside it.
    "mimo": Rule(_QWEN_LAYERS, True, True, _kv(32, **_QWEN_WINDOW), qkv_bias=True),
    "qwen2_moe": Rule(
        pattern.every_other_below_max_window_layers, True, True, _kv(16, **_QWEN_WINDOW), qkv_bias=True
    ),
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_5_omni_text": _QWEN_VL._replace(defaults=_kv(4, sliding_window=32768, max_window_layers=28)),
    "qwen3": Rule(_QWEN_LAYERS, True, True, _kv(32, 128, **_QWEN_WINDOW)),
    # Its layers are not told apart by max_window_layers: switched on, all have the window.
    "qwen3_moe": Rule(_ALL, True, False, _kv(4, sliding_window=4096)),
    "qwen3_omni_moe_text": Rule(_ALL, defaults=_kv(4)),
    "qwen3_vl_text": Rule(defaults=_kv(32, 128)),
    "qwen3_vl_moe_text": Rule(defaults=_kv(16)),
    "cosmos3_edge_text": Rule(defaults=_kv(8, 128)),
    "gemma": Rule(defaults=_kv(16, 256), refused=_BIDIRECTIONAL),
    "gemma2": Rule(pattern.full_every(2), False, True, _kv(4, 256, sliding_window=4096), _BIDIRECTIONAL),
    # Gemma 3 4B's published config leaves out even the number of heads.
    "gemma3_text": Rule(
        pattern.full_every(6, *_STEP_KEYS), False, True, _kv(4, 256, sliding_window=4096, num_attention_heads=8),
        _BIDIRECTIONAL, keys=_STEP_KEYS,
    ),
    "vaultgemma": Rule(pattern.full_every(2), False, True, _kv(4, 256, sliding_window=4096), _BIDIRECTIONAL),
    "gpt_oss": Rule(pattern.full_every(2), False, True, _kv(8, 64, sliding_window=128, attention_bias=True)),
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "flex_olmo": _PLAIN,
    "olmo3": Rule(pattern.full_every(4), False, True, {"sliding_window": 4096}),
    "cohere": _PLAIN,
    "cohere2": Rule(pattern.full_every(4, *_STEP_KEYS), False, True, {"sliding_window": 4096}, keys=_STEP_KEYS),
    "cohere2_moe": Rule(
        pattern.after_dense_layers, False, True,
        {"head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4,
         "prefix_dense_sliding_window_pattern": 1},
        keys=("sliding_window_pattern", "prefix_dense_sliding_window_pattern"),
    ),
    "cohere_compass_text": Rule(_LISTED, False, True, {"sliding_window": 4096}, derives_head_dim=True),
    "minimax_m2": Rule(defaults=_kv(8, 128)),
    "glm": Rule(defaults=_kv(2, 128), qkv_bias=True),
    "glm4": Rule(defaults=_kv(2, 128), qkv_bias=True),
    "glm4v_text": Rule(defaults=_kv(2), qkv_bias=True),
    "glm4_moe": Rule(defaults=_kv(8)),
    "glm4v_moe_text": Rule(defaults=_kv(8)),
    "glm_ocr_text": Rule(defaults=_kv(8)),
    "granite": _PLAIN,
    "granitemoe": _PLAIN,
    "granitemoeshared": _PLAIN,
    "granite4_vision_text": _PLAIN,
    "granite_docling_text": Rule(defaults=_kv(4)),
    "granite_swa": Rule(pattern.full_first_of(4), False, True, _kv(4, sliding_window=128)),
    "granitemoe_swa": Rule(pattern.full_first_of(4), False, True, {"sliding_window": 128}),
    "exaone4": Rule(
        pattern.full_every(4, "sliding_window_pattern"), False, True, _kv(32, sliding_window=4096),
        keys=("sliding_window_pattern",),
    ),
    "exaone_moe": Rule(
        pattern.full_every(4, "sliding_window_pattern"), False, True, _kv(32, sliding_window=4096),
        keys=("sliding_window_pattern",),
    ),
    "smollm3": Rule(
        pattern.without_rope, False, True, _kv(4, no_rope_layer_interval=4),
        keys=("use_sliding_window", "max_window_layers"),
    ),
    "cwm": Rule(pattern.full_first_of(4), False, True, _kv(8, 128, sliding_window=8192)),
    "dots1": Rule(
        _QWEN_LAYERS, False, True, _kv(32, sliding_window=4096, max_window_layers=62), keys=("max_window_layers",)
    ),
    "afmoe": Rule(
        pattern.full_every(4, "global_attn_every_n_layers"), False, True, {"head_dim": 128, "sliding_window": 1024},
        keys=("global_attn_every_n_layers",),
    ),
    "beam": Rule(pattern.and_the_last(pattern.full_every(6)), False, True, _kv(8, 128, sliding_window=512)),
    "flint": Rule(pattern.flint, False, True, _kv(4, 128, sliding_window=513)),
    "kolibri1": Rule(pattern.full_every(5), False, True, _kv(4, 128, sliding_window=513)),
    "laguna": Rule(_LISTED, False, True, _kv(8, 128, sliding_window=512)),
    "mellum": Rule(_LISTED, False, True, _kv(4, 128, sliding_window=1024)),
    "muse_glimmer_text": Rule(pattern.full_last_of(4), False, True, _kv(2, 128, sliding_window=2048)),
    "muse_spark_text": Rule(pattern.full_last_of(4), False, True, _kv(16, 64, sliding_window=2048)),
    "aria_text": _PLAIN,
    "arcee": _PLAIN,
    "apertus": _PLAIN,
    "biogpt": _MULTI_HEAD._replace(qkv_bias=True, rotary=False),
    "bitnet": Rule(defaults=_kv(5)),
    "bloom": _MULTI_HEAD._replace(defaults={"attention_bias": True}, rotary=False),
    "chameleon": Rule(defaults=_kv(32)),
    "deepseek_ocr2_text": Rule(derives_head_dim=True),
    "diffllama": _PLAIN,
    # keep_window_size bounds what a layer looks at, not what it keeps.
    "doge": Rule(_ALL, keys=("keep_window_size",)),
    "emu3_text_model": Rule(defaults=_kv(8)),
    # compression_ratio scales ERNIE's rotary positions.
    "ernie4_5": Rule(defaults=_kv(2, 128), keys=("compression_ratio",)),
    "ernie4_5_moe": Rule(defaults=_kv(4), keys=("compression_ratio",)),
    "ernie4_5_vl_moe_text": Rule(defaults=_kv(4), keys=("compression_ratio",)),
    "gpt_neox": _MULTI_HEAD._replace(defaults={"attention_bias": True}),
    "gpt_neox_japanese": _MULTI_HEAD,
    "helium": Rule(defaults=_kv(20, 128)),
    "higgs_audio_v2": Rule(defaults=_kv(8, 128)),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl_text": _HUNYUAN,
    "hy_v3": Rule(defaults=_kv(8, 128)),
    "hyperclovax": _PLAIN,
    "internlm3": Rule(defaults=_kv(2, 128)),
    "iquestcoder": Rule(defaults=_kv(8, 128)),
    "jais2": _PLAIN,
    "molmo2_text": Rule(defaults=_kv(8, 128)),
    "nanochat": _PLAIN,
    "nemotron": _PLAIN,
    "opt": _MULTI_HEAD._replace(defaults={"attention_bias": True}, rotary=False),
    "paddleocr_vl_text": Rule(defaults=_kv(2, 128)),
    "persimmon": _MULTI_HEAD._replace(defaults={"attention_bias": True}),
    "seed_oss": Rule(defaults=_kv(8, 128), qkv_bias=True),
    "solar_open": Rule(defaults=_kv(8, 128)),
    "stablelm": Rule(defaults=_kv(32)),
    # Published with code of their own, in repositories that are named here.
    # haotian-liu/LLaVA: flat configs, the language model's keys with the vision tower's beside.
    "llava": _PLAIN,
    "llava_llama": _PLAIN,
    "llava_mistral": Rule(_ALL, defaults=_kv(8, sliding_window=4096)),
    "llava_qwen": Rule(_QWEN_LAYERS, True, True, _kv(32, **_QWEN_WINDOW), qkv_bias=True),
    # BAAI/AquilaChat2-7B, inclusionAI/Ling-lite and OrionStarAI/Orion-14B-Base.
    "aquila": _STATED,
    "bailing_moe": _STATED,
    "orion": _STATED,
    # hpcai-tech/grok-1.
    "grok-1": _STATED,
    # Snowflake/snowflake-arctic-instruct.
    "arctic": Rule(_ALL, states_kv_heads=True),
    # baichuan-inc/Baichuan2-7B-Base, internlm/internlm-7b and xverse/XVERSE-7B.
    "baichuan": _MULTI_HEAD,
    "internlm": _MULTI_HEAD,
    "xverse": _MULTI_HEAD,
    # deepseek-ai/deepseek-moe-16b-base, internlm/internlm2-7b and openbmb/MiniCPM-2B-sft-bf16.
    "deepseek": _PLAIN,
    "internlm2": _PLAIN,
    "minicpm": _PLAIN,
    # microsoft/Phi-3-vision-128k-instruct and Phi-4-multimodal-instruct; pytorch/executorch's configs of Phi-4-mini.
    "phi3_v": Rule(_ALL),
    "phi4": Rule(_ALL),
    "phi4mm": Rule(_ALL),
}  # fmt: skip
