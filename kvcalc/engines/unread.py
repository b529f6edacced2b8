"""Model types whose layout in vLLM and TensorRT-LLM nobody has read. SGLang, llama.cpp and MLX list what they know."""

from __future__ import annotations

# In vLLM 0.33.0 some of these have classes of their own, and others run with the classes of Transformers.
_ANYWHERE = (
    "bailing_hybrid bigbird_pegasus blenderbot blenderbot-small blip_text_model canary_decoder cohere_asr cpmant csm "
    "dia_decoder diffusion_gemma_text dots3_note_text encoder-decoder evolla fsmt glm5_next_text gradium_phonon_tts "
    "hrm_text idefics inkling2_text inkling_text kosmos_2_5_text_model kosmos_2_text_model kyutai_speech_to_text led "
    "longt5 mistral_large4_text moonshine moonshine_streaming moshi musicgen_decoder musicgen_melody_decoder mvp "
    "nllb-moe pegasus_x pix2struct_text_model plbart pocket_tts pop2piano pp_formulanet_text prophetnet "
    "qwen4_exp_text seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5 switch_transformers "
    "t5_gemma_module t5gemma2_decoder trocr udop unlimited_ocr_text vision-encoder-decoder voxtral_realtime_text "
    "xlstm zaya"
).split()
_NOT_IN_VLLM = "recurrent_gemma rwkv rwkv6".split()
_IN_VLLM = "mimo_v2 param2moe plamo3 sarvam_mla sarvam_moe solar step1 step3_text step5 telechat3 youtu_llm".split()

NOT_READ_IN_VLLM = frozenset((*_ANYWHERE, *_NOT_IN_VLLM))
NOT_READ_IN_TENSORRT_LLM = frozenset((*_ANYWHERE, *_IN_VLLM))
