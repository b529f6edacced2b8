"""Vision and audio towers compared with Transformers: the same small models, built on the meta device.

Needs the extra `oracle`; skipped without it. Nothing is downloaded and no weight is allocated.
"""

from __future__ import annotations

import copy
import re
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

OPT = {
    "model_type": "opt", "hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "word_embed_proj_dim": 48, "vocab_size": 96,
}  # fmt: skip
FORMER = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "encoder_hidden_size": 32, "vocab_size": 50, "max_position_embeddings": 9,
}  # fmt: skip
KOSMOS = {"vocab_size": 96, "embed_dim": 48, "layers": 2, "ffn_dim": 64, "attention_heads": 4}
SAM = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64, "window_size": 3,
    "global_attn_indexes": [1], "mlp_dim": 40,
}  # fmt: skip
OCR = {
    "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "mlp_layer_types": ["dense", "sparse"], "head_dim": 12,
}  # fmt: skip
RADIO = {
    "model_type": "radio", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "video_temporal_patch_size": 2,
}  # fmt: skip
PARAKEET = {
    "model_type": "parakeet_encoder", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "conv_kernel_size": 5, "subsampling_conv_channels": 6, "num_mel_bins": 16,
}  # fmt: skip

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
    ("glm4v_moe", {"text_config": {"model_type": "glm4v_moe_text", **TEXT, "n_routed_experts": 2,
                                   "num_experts_per_tok": 1, "moe_intermediate_size": 8, "pad_token_id": 0},
                   "vision_config": QWEN}),
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
    ("idefics2", {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": VIT,
                  "perceiver_config": {"resampler_depth": 2, "resampler_n_latents": 5, "resampler_n_heads": 4,
                                       "num_key_value_heads": 2, "resampler_head_dim": 6}}),
    ("idefics2", {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": {}}),
    ("aria", {"text_config": {"model_type": "aria_text", **TEXT, "moe_num_experts": 2, "pad_token_id": 0},
              "vision_config": VIT, "projector_patch_to_query_dict": {4: 6, 9: 7}}),
    ("blip-2", {"text_config": OPT, "vision_config": VIT, "num_query_tokens": 5,
                "qformer_config": {**FORMER, "use_qformer_text_input": True}}),
    ("instructblip", {"text_config": OPT, "vision_config": VIT, "qformer_config": FORMER}),
    ("granite4_vision", {"text_config": {"model_type": "granite4_vision_text", **TEXT, "pad_token_id": 0},
                         "vision_config": {**SIGLIP, "hidden_size": 64}, "downsample_rate": "1/2",
                         "qformer_config": {**FORMER, "cross_attention_frequency": 1}, "deepstack_layer_map": [[-2, 0]],
                         "image_grid_pinpoints": [[28, 28]]}),
    ("granite_docling", {"text_config": {"model_type": "granite_docling_text", **TEXT, "pad_token_id": 0},
                         "vision_config": {**VIT, "out_hidden_size": 48, "scale_factor": 2, "image_size": 64,
                                           "deepstack_visual_indexes": [1], "use_fine_route": False}}),
    ("molmo2", {"text_config": {"model_type": "molmo2_text", **TEXT}, "vision_config": {
                    **VIT, "head_dim": 10, "num_key_value_heads": 2, "num_position_embeddings": 11},
                "adapter_config": {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                                   "head_dim": 6, "intermediate_size": 20, "text_hidden_size": 48,
                                   "vision_feature_layer": [0, 1, 2], "mlp_bias": True}}),
    ("kosmos-2", {"text_config": KOSMOS, "vision_config": {**VIT, "image_size": 28}, "latent_query_num": 5}),
    ("kosmos-2.5", {"text_config": KOSMOS, "vision_config": {**VIT, "head_dim": 6, "max_num_patches": 9,
                                                             "patch_embed_hidden_size": 10}}),
    ("minicpmv4_6", {"text_config": {"model_type": "qwen3_5_text", **TEXT, **GATED},
                     "vision_config": {**VIT, "image_size": 64, "window_kernel_size": [2, 3]}, "merger_times": 2}),
    ("step3p7", {"text_config": {"model_type": "step3p5", **TEXT, "moe_num_experts": 2, "moe_layers_enum": "1"},
                 "vision_config": {**VIT, "image_size": 56, "mlp_ratio": 1.5}, "projector_bias": True}),
    ("lfm3_vl", {"text_config": {"model_type": "lfm3", **TEXT, "pad_token_id": 0},
                 "vision_config": {**VIT, "num_key_value_heads": 2, "conv_kernel_size": 5}}),
    ("hunyuan_vl", {"text_config": {"model_type": "hunyuan_vl_text", **TEXT, "pad_token_id": 0},
                    "vision_config": {**VIT, "max_image_size": 64, "text_hidden_size": 48}}),
    ("cosmos3_edge", {"text_config": {"model_type": "cosmos3_edge_text", **TEXT, "head_dim": 128},
                      "projector_hidden_size": 10, "vision_config": {**VIT, "num_patches": 9}}),
    ("cosmos3_omni", {"text_config": {"model_type": "qwen3_vl_text", **TEXT}, "vision_config": QWEN}),
    ("muse_glimmer", {"text_config": {"model_type": "muse_glimmer_text", **TEXT}, "out_hidden_size": 128,
                      "projector_hidden_size": 20,
                      "vision_config": {**VIT, "pos_emb_height": 3, "layer_types": ["full_attention"] * 3}}),
    ("nemotron_h_omni", {"text_config": {"model_type": "nemotron_h", **TEXT, "hybrid_override_pattern": "M*",
                                         "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
                                         "ssm_state_size": 4, "num_nextn_predict_layers": 1},
                         "vision_hidden_size": 32,
                         "vision_config": {**RADIO, "mlp_ratio": 2.0, "max_img_size": 64, "qkv_bias": False},
                         "audio_config": {**PARAKEET, "attention_bias": False, "projection_hidden_size": 9,
                                          "projection_bias": False}}),
    ("ernie4_5_vl_moe", {"text_config": {"model_type": "ernie4_5_vl_moe_text", **TEXT, "head_dim": 128,
                                         "moe_num_experts": 2, "moe_intermediate_size": [8, 8]},
                         "vision_config": QWEN}),
    ("florence2", {"text_config": {"model_type": "bart", "d_model": 48, "encoder_layers": 1, "decoder_layers": 1,
                                   "encoder_attention_heads": 4, "decoder_attention_heads": 4},
                   "vision_config": {"depths": [1, 2], "patch_size": [7, 3], "patch_stride": [4, 2],
                                     "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [16, 32],
                                     "num_heads": [2, 4], "num_groups": [2, 4], "projection_dim": 48,
                                     "qkv_bias": False}}),
    ("got_ocr2", {"text_config": {"model_type": "qwen2", **TEXT},
                  "vision_config": {**SAM, "output_channels": 6, "use_abs_pos": False}}),
    ("deepseek_vl_hybrid", {"text_config": LLAMA, "vision_config": SIGLIP,
                            "high_res_vision_config": {**SAM, "output_channels": 6, "qkv_bias": False}}),
    ("unlimited_ocr", {"text_config": {"model_type": "unlimited_ocr_text", **TEXT, **OCR},
                       "vision_config": {"sam_config": {**SAM, "downsample_channels": [5, 32]},
                                         "encoder_config": {**VIT, "image_size": 28, "patch_size": 14}}}),
    ("deepseek_ocr2", {"text_config": {"model_type": "deepseek_ocr2_text", **TEXT, **OCR},
                       "vision_config": {"sam_config": {**SAM, "downsample_channels": [5, 32]},
                                         "encoder_config": {**VIT, "num_key_value_heads": 2}}}),
    ("phi4_multimodal", {**TEXT, "pad_token_id": 0, "vision_config": {**VIT, "image_size": 56},
                         "audio_config": {"hidden_size": 32, "intermediate_size": 20, "num_blocks": 2, "kernel_size": 5,
                                          "num_attention_heads": 4, "ext_pw_out_channel": 32, "input_size": 30,
                                          "depthwise_separable_out_channel": 32, "nemo_conv_channels": 6,
                                          "nemo_final_size": 4, "bias_max_distance": 7}}),
    ("granite_speech", {"text_config": {"model_type": "granite", **TEXT}, "projector_config": FORMER,
                        "window_size": 6, "downsample_rate": 2,
                        "encoder_config": {"hidden_dim": 32, "num_layers": 2, "num_heads": 3, "dim_head": 5,
                                           "max_pos_emb": 9, "context_size": 7, "conv_kernel_size": 3, "output_dim": 4,
                                           "conv_expansion_factor": 3, "feedforward_mult": 2, "input_dim": 9}}),
    ("cohere_asr", {**TEXT, "encoder_config": {**PARAKEET, "convolution_bias": False}}),
    ("voxtral_realtime", {"text_config": {"model_type": "voxtral_realtime_text", **TEXT}, "downsample_factor": 2,
                          "audio_config": {**VIT, "num_mel_bins": 16, "head_dim": 10}}),
    ("fun_asr_nano", {"text_config": {"model_type": "qwen3", **TEXT},
                      "audio_config": {**VIT, "num_mel_bins": 10, "num_stacked_frames": 5, "fsmn_kernel_size": 3,
                                       "num_timestamp_prediction_layers": 1},
                      "adaptor_config": {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 12,
                                         "projector_hidden_size": 20}}),
    ("muse_spark", {"vision_config": {**VIT, "layer_types": ["full_attention"] * 3}, "out_hidden_size": 128,
                    "text_config": {"model_type": "muse_spark_text", **TEXT, "num_local_experts": 2,
                                    "num_experts_per_tok": 1, "moe_intermediate_size": 8},
                    "audio_config": {"hidden_sizes": [8, 16], "patch_sizes": [4, 3], "depths": [1, 2],
                                     "num_hidden_layers": 2, "out_hidden_size": 48, "conv_kernel_size": 3}}),
    ("dots3_note", {"vision_config": {**VIT, "adapter_in_dim": 32, "adapter_out_dim": 5120, "moe_intermediate_size": 12,
                                      "num_local_experts": 3, "num_experts_per_tok": 1,
                                      "mlp_layer_types": ["dense", "sparse", "sparse"],
                                      "per_layer_config": {"1": {"num_local_experts": 2}}},
                    "audio_config": {**VIT, "feature_size": 16, "downsample_hidden_size": 6, "conv_output_size": 12,
                                     "adapter_input_size": 32, "adapter_out_dim": 5120, "head_dim": 8}}),
    ("moss_transcribe_diarize", {"text_config": {"model_type": "qwen3", **TEXT}, "audio_merge_size": 2,
                                 "audio_config": {**VIT, "max_source_positions": 20}}),
]  # fmt: skip


# The parameters of the language model, of its head and of decoders.
OF_TEXT = re.compile(r"language_model|text_model|lm_head|^proj_out|^(model\.)?(layers|embed_tokens|norm|decoder)\.")


# Their classes decide in their own ways whether, and how wide, the output head is.
OWN_HEADS = ("audioflamingo3", "blip-2", "hunyuan_vl", "instructblip", "ovis2", "paddleocr_vl")


@pytest.mark.parametrize(("model_type", "config"), CASES)
def test_towers_have_the_parameters_of_transformers_class(model_type: str, config: dict[str, Any]) -> None:
    model = built(model_type, config)
    outside = [parameter.numel() for name, parameter in model.named_parameters() if not OF_TEXT.search(name)]
    is_whole = "text_config" in config or not hasattr(model.config, "text_config")
    defaults = {} if is_whole else {"text_config": model.config.text_config.to_dict()}
    stated = {**defaults, **copy.deepcopy(config), "tie_word_embeddings": False}
    spec = kvcalc.read_config({"model_type": model_type, **stated}, "own", "test")
    towers = towers_of(spec)
    assert [tower.reason for tower in towers] == [None] * len(towers)
    assert len(towers) == len({"vision_config", "audio_config", "encoder_config"} & config.keys())
    assert sum(tower.parameters or 0 for tower in towers) == sum(outside)
    weights = weights_of(spec)
    if weights is not None and is_whole and model_type not in OWN_HEADS:
        assert count_parameters(weights).total == sum(p.numel() for p in model.parameters()) - sum(outside)


# Models whose text model has names of its own: the names of the tower's parameters.
CAPTIONERS: list[tuple[str, dict[str, Any], str]] = [
    ("blip", {"vision_config": {**VIT, "image_size": 32}}, r"vision_model\."),
    ("git", {"vision_config": VIT, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2},
     r"git\.(image_encoder|visual_projection)\."),
    ("git", {"vision_config": {**VIT, "image_size": 64}, "hidden_size": 48, "num_attention_heads": 4,
             "num_hidden_layers": 2, "num_image_with_embedding": 6},
     r"git\.(image_encoder|visual_projection|img_temporal_embedding)\."),
    ("pix2struct", {"vision_config": {"hidden_size": 32, "d_ff": 40, "d_kv": 5, "num_attention_heads": 4,
                                      "num_hidden_layers": 3, "seq_len": 9}}, r"encoder\."),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "config", "of_tower"), CAPTIONERS)
def test_towers_of_captioners(model_type: str, config: dict[str, Any], of_tower: str) -> None:
    model = built(model_type, config)
    own = sum(parameter.numel() for name, parameter in model.named_parameters() if re.match(of_tower, name))
    (tower,) = towers_of(kvcalc.read_config(model.config.to_dict(), "own", "test"))
    assert own
    assert (tower.reason, tower.parameters) == (None, own)


def test_minicpm_o_has_whispers_encoder_and_two_linear_layers() -> None:
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes: dict[str, Any] = {**WHISPER, "encoder_ffn_dim": 64}
    config = WhisperConfig(**sizes)
    with torch.device("meta"):
        parts = (WhisperEncoder(config), torch.nn.Linear(16, 48), torch.nn.Linear(48, 48))
    stated = {"model_type": "minicpmo", "version": "2.6", **TEXT, "audio_config": config.to_dict()}
    (tower,) = towers_of(kvcalc.read_config(stated, "own", "test"))
    # The table of positions is a parameter of the encoder that is not trained.
    assert tower.parameters == sum(parameter.numel() for part in parts for parameter in part.parameters())


def built(model_type: str, config: dict[str, Any]) -> Any:
    import torch
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    )

    made = AutoConfig.for_model(model_type, **{**copy.deepcopy(config), "tie_word_embeddings": False})
    for automatic in (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForCausalLM, AutoModel):
        if type(made) in automatic._model_mapping:
            with torch.device("meta"):
                return automatic.from_config(made, dtype=torch.bfloat16)
    raise LookupError(model_type)


def test_the_parameters_of_a_whole_model_are_those_of_its_parts() -> None:
    name, config = CASES[9]
    stated = {**copy.deepcopy(config), "tie_word_embeddings": False}
    spec = kvcalc.read_config({"model_type": name, **stated}, "own", "test")
    weights = weights_of(spec)
    assert weights is not None
    whole = sum(parameter.numel() for parameter in built(name, config).parameters())
    assert count_parameters(weights).total + (towers_of(spec)[0].parameters or 0) == whole
