"""kvcalc compared with Transformers: the two caches of small encoder-decoders, after a step of the decoder.

Needs the extra `oracle`; skipped without it. Nothing is downloaded.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

import kvcalc
from tests.documents import estimate
from tests.oracle.held import tensor_bytes

pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

ENCODER_TOKENS = 20
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 64, **PAD,
}  # fmt: skip
T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 4, "d_ff": 8, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    **PAD,
}  # fmt: skip
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 8}
GEMMA = {**SIZES, "num_hidden_layers": 7, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, **PAD}
BERT = {**SIZES, "model_type": "bert", "max_position_embeddings": 40, **PAD}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 40}
TROCR = {
    "model_type": "trocr", "vocab_size": 64, "d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 2,
    "decoder_ffn_dim": 8, "max_position_embeddings": 40, "cross_attention_hidden_size": 32, **PAD,
}  # fmt: skip
VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
       "intermediate_size": 8, "image_size": 16, "patch_size": 8}  # fmt: skip

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", {**BART, "attention_type": "original_full"}),
    ("blenderbot", "BlenderbotForConditionalGeneration", BART),
    ("blenderbot-small", "BlenderbotSmallForConditionalGeneration", BART),
    ("canary", "CanaryForConditionalGeneration", {
        "vocab_size": 64, "decoder_config": {**SIZES, "num_key_value_heads": 2}, "encoder_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8,
        },
    }),
    ("dia", "DiaForConditionalGeneration", {
        "decoder_config": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "cross_num_key_value_heads": 4,
                           "cross_num_attention_heads": 4, "cross_head_dim": 16, "cross_hidden_size": 32,
                           "num_channels": 1},
        "encoder_config": {**SIZES, "num_key_value_heads": 4, "head_dim": 8},
        "delay_pattern": [0], **PAD,
    }),
    ("fsmt", "FSMTForConditionalGeneration", {**BART, "src_vocab_size": 64, "tgt_vocab_size": 64,
                                              "langs": ["en", "de"]}),
    ("led", "LEDForConditionalGeneration", {**BART, "max_encoder_position_embeddings": 64,
                                            "max_decoder_position_embeddings": 64, "attention_window": 4}),
    ("longt5", "LongT5ForConditionalGeneration", T5),
    ("moonshine", "MoonshineForConditionalGeneration", {
        "vocab_size": 64, "hidden_size": 32, "encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        "intermediate_size": 8, **PAD,
    }),
    ("mvp", "MvpForConditionalGeneration", BART),
    ("nllb-moe", "NllbMoeForConditionalGeneration", {**BART, "num_experts": 2, "decoder_sparse_step": 0,
                                                     "encoder_sparse_step": 0}),
    ("pegasus_x", "PegasusXForConditionalGeneration", {**BART, "block_size": 4, "num_global_tokens": 2}),
    ("plbart", "PLBartForConditionalGeneration", BART),
    ("prophetnet", "ProphetNetForConditionalGeneration", {
        "vocab_size": 64, "hidden_size": 32, "num_encoder_layers": 3, "num_decoder_layers": 3,
        "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8, "max_position_embeddings": 64, **PAD,
    }),
    ("pix2struct", "Pix2StructForConditionalGeneration", {
        "text_config": {"vocab_size": 64, "hidden_size": 32, "d_kv": 8, "d_ff": 8, "num_layers": 3, "num_heads": 4},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "d_kv": 8, "d_ff": 8},
    }),
    ("pop2piano", "Pop2PianoForConditionalGeneration", T5),
    ("pp_formulanet", "PPFormulaNetForConditionalGeneration", {"text_config": BART}),
    ("seamless_m4t", "SeamlessM4TForTextToText", {
        **{k: v for k, v in BART.items() if k != "d_model"}, "hidden_size": 32, "speech_encoder_layers": 1,
    }),
    ("speech_to_text", "Speech2TextForConditionalGeneration", {**BART, "max_source_positions": 64,
                                                               "max_target_positions": 64}),
    ("speecht5", "SpeechT5ForSpeechToText", {**{k: v for k, v in BART.items() if k != "d_model"}, "hidden_size": 32,
                                             "max_text_positions": 64}),
    ("switch_transformers", "SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 2,
                                                                           "num_sparse_encoder_layers": 0,
                                                                           "num_sparse_decoder_layers": 0}),
    ("t5gemma", "T5GemmaForConditionalGeneration", {"encoder": GEMMA, "decoder": GEMMA}),
    ("t5gemma2", "T5Gemma2ForConditionalGeneration", {"encoder": {"text_config": GEMMA}, "decoder": GEMMA}),
    ("udop", "UdopForConditionalGeneration", T5),
    ("musicgen", "MusicgenForConditionalGeneration", {
        "decoder": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "ffn_dim": 8, "num_codebooks": 1},
        "text_encoder": {"model_type": "t5", **T5},
        "audio_encoder": {"model_type": "encodec"},
    }),
    ("encoder-decoder", "EncoderDecoderModel", {"encoder": BERT, "decoder": {
        **BERT, "is_decoder": True, "add_cross_attention": True,
    }}),
    ("encoder-decoder", "EncoderDecoderModel", {"encoder": BERT, "decoder": {**GPT2, "add_cross_attention": True}}),
    ("vision-encoder-decoder", "VisionEncoderDecoderModel", {"encoder": VIT, "decoder": {
        **TROCR, "is_decoder": True, "add_cross_attention": True,
    }}),
]  # fmt: skip


def both_caches(model_type: str, name: str, config: dict[str, Any], tokens: int) -> int:
    """Bytes of both caches after `tokens` decoder tokens, for an encoder's output of ENCODER_TOKENS tokens."""
    import torch
    import transformers
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    built = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(config))
    with torch.device("cpu"):
        model = getattr(transformers, name)._from_config(built, dtype=torch.float32).eval()
    hidden = torch.zeros(1, ENCODER_TOKENS, 32)
    encoded: Any = BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden)
    encoded.attention_mask = encoded.router_logits = None
    ids = torch.ones(1, tokens, dtype=torch.long)
    with torch.no_grad():
        out = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True)
    kept = out.past_key_values
    layers = (*kept.self_attention_cache.layers, *kept.cross_attention_cache.layers)
    return sum(map(tensor_bytes, layers))


@pytest.mark.parametrize(("model_type", "name", "config"), CASES, ids=lambda v: v if isinstance(v, str) else None)
@pytest.mark.parametrize("tokens", [1, 13])
def test_both_caches_are_what_kvcalc_says(model_type: str, name: str, config: dict[str, Any], tokens: int) -> None:
    spec = kvcalc.read_config({"model_type": model_type, **config}, model_type, "small")
    answer = estimate(
        spec, context_tokens=tokens, dtype="fp32", engine="transformers", encoder_tokens=ENCODER_TOKENS
    )  # fmt: skip
    assert answer["kv_cache"]["total_bytes"] == both_caches(model_type, name, config, tokens)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
SWIN = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
ENCODERS: list[dict[str, Any]] = [
    *({"model_type": kind, **SMALL} for kind in (
        "beit", "clip_vision_model", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit",
        "ijepa", "siglip_vision_model", "vit", "vit_msn",
    )),
    *({"model_type": kind, **SMALL, "image_size": [96, 64]} for kind in ("beit", "deit", "vit")),
    {"model_type": "vit", **SMALL, "image_size": 384, "patch_size": 32},
    {"model_type": "dinov3_vit", **SMALL, "num_register_tokens": 3},
    {"model_type": "dinov2_with_registers", **SMALL, "num_register_tokens": 2},
    *({"model_type": kind, **SWIN} for kind in ("donut-swin", "swin", "swinv2")),
    {"model_type": "swinv2", **SWIN, "image_size": [240, 102]},
    {"model_type": "donut-swin", **SWIN, "image_size": [896, 672], "window_size": 7},
    {"model_type": "swinv2", **SWIN, "depths": [1, 1], "num_heads": [1, 1], "image_size": [64, 32]},
]  # fmt: skip


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda encoder: f"{encoder['model_type']}-{len(encoder)}")
def test_a_vision_encoder_outputs_the_tokens_of_its_image(encoder: dict[str, Any]) -> None:
    import torch
    import transformers

    built = transformers.AutoConfig.for_model(**encoder)
    sides = built.image_size if isinstance(built.image_size, (list, tuple)) else [built.image_size] * 2
    with torch.no_grad():
        out = transformers.AutoModel.from_config(built).eval()(torch.zeros(1, 3, *sides)).last_hidden_state
    spec = kvcalc.read_config({"model_type": "vision-encoder-decoder", "encoder": encoder, "decoder": TROCR}, "x", "x")
    assert spec.encoder_tokens == out.shape[1]
