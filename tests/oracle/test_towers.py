"""Vision and audio towers compared with Transformers: the same small models, built on the meta device.

Needs the extra `oracle`; skipped without it. Nothing is downloaded and no weight is allocated.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import kvcalc
from kvcalc.memory.weights import count_parameters
from kvcalc.model.spec import weights_of
from kvcalc.model.towers import towers_of

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TEXT = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 12,
}  # fmt: skip
VIT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 48}
GATED = {
    "full_attention_interval": 2, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_num_value_heads": 4, "linear_value_head_dim": 8,
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", **VIT, "image_size": 28, "patch_size": 14}
CLIP = {"model_type": "clip_vision_model", **VIT, "image_size": 28, "patch_size": 14}
PIXTRAL = {"model_type": "pixtral", **VIT, "head_dim": 8, "patch_size": 14}
LLAMA = {"model_type": "llama", **TEXT}
WHISPER = {
    "d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "num_mel_bins": 16,
    "max_source_positions": 20,
}  # fmt: skip
AUDIO4 = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "output_proj_dims": 24}

# Model type, its config. Keys left out have the defaults of Transformers' configuration class.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_vl", {"text_config": {"model_type": "qwen2_vl_text", **TEXT},
                  "vision_config": {"depth": 3, "embed_dim": 32, "num_heads": 4, "hidden_size": 48, "mlp_ratio": 2}}),
    ("qwen2_vl", {"vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 8192}}),
    ("qwen2_5_vl", {"text_config": {"model_type": "qwen2_5_vl_text", **TEXT}, "vision_config": QWEN}),
    ("qwen2_5_vl", {"vision_config": {"out_hidden_size": 8192, "hidden_size": 1280}}),
    ("qwen3_vl", {"text_config": {"model_type": "qwen3_vl_text", **TEXT},
                  "vision_config": {**QWEN, "deepstack_visual_indexes": [1]}}),
    ("qwen3_vl", {"vision_config": {"patch_size": 14, "out_hidden_size": 4096}}),
    ("qwen3_vl_moe", {"vision_config": {**QWEN, "out_hidden_size": 2048, "num_position_embeddings": 100}}),
    ("qwen3_5", {"text_config": {"model_type": "qwen3_5_text", **TEXT, **GATED},
                 "vision_config": {**QWEN, "deepstack_visual_indexes": [1]}}),
    ("qwen3_5_moe", {"vision_config": {**QWEN, "out_hidden_size": 2048}}),
    ("gemma3", {"text_config": {"model_type": "gemma3_text", **TEXT}, "vision_config": SIGLIP}),
    ("gemma3", {"text_config": {"model_type": "gemma3_text", **TEXT},
                "vision_config": {**SIGLIP, "vision_use_head": False, "num_channels": 1}}),
    ("paligemma", {"text_config": {"model_type": "gemma", **TEXT}, "vision_config": SIGLIP, "projection_dim": 48}),
    ("llava", {"text_config": LLAMA, "vision_config": CLIP}),
    ("llava", {"text_config": LLAMA, "vision_config": SIGLIP, "vision_feature_layer": [-2, -1]}),
    ("llava", {"text_config": LLAMA, "vision_config": PIXTRAL, "multimodal_projector_bias": False}),
    ("llava_next", {"text_config": LLAMA, "vision_config": CLIP}),
    ("llava_onevision", {"text_config": {"model_type": "qwen2", **TEXT},
                         "vision_config": {**SIGLIP, "vision_use_head": False}}),
    ("mistral3", {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": PIXTRAL}),
    ("mistral3", {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": PIXTRAL, "spatial_merge_size": 3,
                  "multimodal_projector_bias": True}),
    ("idefics3", {"text_config": LLAMA, "vision_config": {**VIT, "image_size": 56, "patch_size": 14},
                  "scale_factor": 3}),
    ("smolvlm", {"text_config": LLAMA, "vision_config": {**VIT, "image_size": 64}}),
    ("lfm2_vl", {"text_config": {"model_type": "lfm2", **TEXT},
                 "vision_config": {"model_type": "siglip2_vision_model", **VIT, "num_patches": 9}}),
    ("internvl", {"text_config": {"model_type": "qwen2", **TEXT},
                  "vision_config": {**VIT, "image_size": [28, 28], "patch_size": [14, 14]}}),
    ("internvl", {"text_config": {"model_type": "qwen2", **TEXT}, "downsample_ratio": 0.5,
                  "vision_config": {**VIT, "image_size": [28, 28], "attention_bias": True, "use_qk_norm": True,
                                    "norm_type": "rms_norm"}}),
    ("llama4", {"text_config": {"model_type": "llama4_text", **TEXT, "num_local_experts": 2,
                                "intermediate_size_mlp": 64},
                "vision_config": {**VIT, "image_size": 28, "projector_input_dim": 36, "projector_output_dim": 36,
                                  "vision_output_dim": 36}}),
    ("mllama", {"text_config": {"model_type": "mllama_text_model", **TEXT, "pad_token_id": 0,
                                "cross_attention_layers": [1]},
                "vision_config": {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
                                  "num_global_layers": 2, "attention_heads": 4, "image_size": 28,
                                  "intermediate_layers_indices": [0, 1], "vision_output_dim": 96}}),
    ("kimi_k25", {"vision_config": {**VIT, "pos_emb_height": 8}, "projection_hidden_size": 32}),
    ("glm4v", {"text_config": {"model_type": "glm4v_text", **TEXT}, "vision_config": QWEN}),
    ("glm4v_moe", {"vision_config": {**QWEN, "attention_bias": True, "image_size": 28, "out_hidden_size": 4096}}),
    ("gemma4", {"text_config": {"model_type": "gemma4_text", **TEXT},
                "vision_config": {**VIT, "head_dim": 12, "num_key_value_heads": 2, "standardize": True},
                "audio_config": AUDIO4}),
    ("gemma4", {"text_config": {"model_type": "gemma4_text", **TEXT}, "vision_config": {}, "audio_config": {}}),
    ("gemma4_unified", {"text_config": {"model_type": "gemma4_unified_text", **TEXT}, "vision_config": {},
                        "audio_config": {}}),
    ("aya_vision", {"text_config": LLAMA, "vision_config": SIGLIP, "alignment_intermediate_size": 80}),
    ("cohere2_vision", {"text_config": LLAMA, "vision_config": SIGLIP, "alignment_intermediate_size": 80}),
    ("deepseek_vl", {"text_config": LLAMA, "vision_config": SIGLIP}),
    ("vipllava", {"text_config": LLAMA, "vision_config": CLIP}),
    ("vipllava", {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layers": [-2, 1]}),
    ("video_llava", {"text_config": LLAMA, "vision_config": CLIP}),
    ("video_llama_3", {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {**VIT, "patch_size": 14}}),
    ("paddleocr_vl", {"text_config": {"model_type": "paddleocr_vl_text", **TEXT},
                      "vision_config": {**VIT, "image_size": 56}}),
    ("glm_ocr", {"text_config": {"model_type": "glm_ocr_text", **TEXT}, "vision_config": {**QWEN, "in_channels": 3}}),
    ("glm_ocr", {"text_config": {"model_type": "glm_ocr_text", **TEXT},
                 "vision_config": {**QWEN, "attention_bias": False}}),
    ("ovis2", {"text_config": {"model_type": "qwen2", **TEXT}, "hidden_size": 48,
               "vision_config": {**VIT, "vocab_size": 50, "image_size": 28, "hidden_stride": 2, "qkv_bias": True,
                                 "mlp_bias": True}}),
    ("lighton_ocr", {"text_config": {"model_type": "qwen3", **TEXT}, "vision_config": PIXTRAL}),
    ("mistral_large4", {"text_config": {"model_type": "mistral_large4_text", **TEXT}, "vision_config": PIXTRAL}),
    ("qianfan_ocr", {"text_config": {"model_type": "qwen3", **TEXT},
                     "vision_config": {**VIT, "image_size": [28, 28], "patch_size": [14, 14]}}),
    ("audioflamingo3", {"text_config": {"model_type": "qwen2", **TEXT},
                        "audio_config": {**VIT, "num_mel_bins": 16, "max_source_positions": 20}}),
    ("glmasr", {"text_config": LLAMA, "audio_config": {**VIT, "num_mel_bins": 16, "intermediate_size": 128}}),
    ("minimax_m3_vl", {"vision_config": {**VIT, "model_type": "clip_vision_model"}}),
    ("qwen2_audio", {"text_config": {"model_type": "qwen2", **TEXT}, "audio_config": WHISPER}),
    ("voxtral", {"text_config": LLAMA,
                 "audio_config": {**VIT, "num_mel_bins": 16, "max_source_positions": 20, "intermediate_size": 128}}),
    ("qwen2_5_omni_thinker", {"audio_config": {**WHISPER, "output_dim": 48}, "vision_config": QWEN}),
    ("qwen3_omni_moe_thinker", {"audio_config": {**WHISPER, "output_dim": 48}, "vision_config": QWEN}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_towers_have_the_parameters_of_transformers_class(model_type: str, config: dict[str, Any]) -> None:
    model = built(model_type, config)
    outside = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not any(part in name for part in ("language_model", "text_model", "lm_head"))
    ]
    defaults = {} if "text_config" in config else {"text_config": model.config.text_config.to_dict()}
    spec = kvcalc.read_config({"model_type": model_type, **defaults, **copy.deepcopy(config)}, "own", "test")
    towers = towers_of(spec)
    assert [tower.reason for tower in towers] == [None] * len(towers)
    assert len(towers) == ("vision_config" in config) + ("audio_config" in config)
    assert sum(tower.parameters or 0 for tower in towers) == sum(outside)


def built(model_type: str, config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    made = AutoConfig.for_model(model_type, **copy.deepcopy(config))
    for automatic in (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModel):
        if type(made) in automatic._model_mapping:
            with torch.device("meta"):
                return automatic.from_config(made, dtype=torch.bfloat16)
    raise LookupError(model_type)


def test_the_parameters_of_a_whole_model_are_those_of_its_parts() -> None:
    name, config = CASES[9]
    spec = kvcalc.read_config({"model_type": name, **copy.deepcopy(config)}, "own", "test")
    weights = weights_of(spec)
    assert weights is not None
    whole = sum(parameter.numel() for parameter in built(name, config).parameters())
    assert count_parameters(weights).total + (towers_of(spec)[0].parameters or 0) == whole
