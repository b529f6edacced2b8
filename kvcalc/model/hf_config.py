"""Read a config mapping, which uses the keys of the published config.json, into a ModelSpec.

Presets, config.json files and flags all take this path. The model_type selects the family's reader. An unknown type is
an error, and so is an unknown key of a known type if its name suggests that it changes the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvcalc.errors import ModelError, nearest
from kvcalc.model.reader import TOWER_KEYS, ConfigReader
from kvcalc.model.spec import ModelSpec, cache_runs

# model_type -> module in kvcalc.model.families. Plain decoders are not listed here, because they are rows of
# presets/types/decoders.yaml. Modules are imported on demand, so a start imports only one.
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
    "hrm_text": "hrm_text",
    "opt": "opt",
    "qwen4_exp_text": "qwen4",
    "recurrent_gemma": "recurrent_gemma",
    "step3p5": "step",
    "unlimited_ocr_text": "unlimited_ocr",
    "xlstm": "xlstm",
    **dict.fromkeys("bailing_hybrid glm5_next_text".split(), "delta_latent"),
    **dict.fromkeys("bamba falcon_h1 granitemoehybrid jamba".split(), "mamba_hybrids"),
    **dict.fromkeys("bart m2m_100 marian mbart mt5 pegasus t5 umt5 whisper".split(), "encoder_decoder"),
    **dict.fromkeys("dots3_note_text mistral_large4_text".split(), "latent_layers"),
    **dict.fromkeys("falcon_mamba mamba mamba2".split(), "mamba"),
    **dict.fromkeys("diffusion_gemma_text gemma3n_text gemma4_text gemma4_unified_text".split(), "gemma4"),
    **dict.fromkeys("inkling2_text inkling_text zaya".split(), "convolved_attention"),
    **dict.fromkeys("lfm2 lfm2_moe lfm3".split(), "lfm2"),
    **dict.fromkeys("olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next".split(), "gated_delta"),
    **dict.fromkeys("rwkv rwkv6".split(), "rwkv"),
    **dict.fromkeys("encoder-decoder speech-encoder-decoder vision-encoder-decoder".split(), "composed"),
    **dict.fromkeys(
        (
            "bigbird_pegasus blenderbot blenderbot-small blip_text_model canary_decoder cohere_asr dia_decoder fsmt "
            "led longt5 moonshine moonshine_streaming musicgen_decoder musicgen_melody_decoder mvp nllb-moe pegasus_x "
            "pix2struct_text_model plbart pop2piano pp_formulanet_text prophetnet seamless_m4t seamless_m4t_v2 "
            "speech_to_text speecht5 switch_transformers t5_gemma_module t5gemma2_decoder trocr udop"
        ).split(),
        "sequences",
    ),
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
            "albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2 distilbert electra "
            "ernie git megatron-bert mpnet nomic_bert rembert roberta roberta-prelayernorm roc_bert roformer "
            "xlm-roberta xlm-roberta-xl xmod"
        ).split(),
        "bert",
    ),
}

# The same for types that are published with their own code and have no class in Transformers. The formula applies to
# them as to any other type, but what Transformers' cache would hold is not known. "deepseek_ref" is the model_type in
# SGLang's converted checkpoints of DeepSeek-V4, after its reference code.
REMOTE_FAMILIES: dict[str, str] = {
    "chatglm": "multi_query",
    "deci": "nas",
    "deepseek_ref": "deepseek_v4",
    "mimo_v2": "mimo",
    "minimax_m1": "minimax",
    "minimax_m3": "minimax_m3",
    "minimax_text_01": "minimax",
    "nemotron-nas": "nas",
    "openelm": "openelm",
    "plamo3": "plamo3",
    "sarvam_mla": "deepseek",
    "step3p7": "step",
    "step5": "step",
    "youtu_llm": "deepseek",
}

# Types of Transformers that generate, but have no cache that can be counted: why.
REFUSED: dict[str, str] = {
    "bark": "three models generate in turn, each with a cache of its own",
    "blt": "its caches of bytes and of patches depend on the text, which decides where patches end",
    **dict.fromkeys(
        "flaubert openai-gpt xlm".split(), "Transformers keeps no cache for it, and computes all tokens in every step"
    ),
    **dict.fromkeys(
        "gemma4_assistant gemma4_unified_assistant".split(), "it drafts tokens for Gemma 4 and only reads Gemma's cache"
    ),
    "reformer": "it keeps hidden states and hash buckets, not keys and values",
    "xlnet": "it keeps hidden states (mems), not keys and values",
}

# Keys that every family accepts: they have no cache-like name, or they mean the same in every family. Besides these, a
# preset may contain only the keys in its family's KEYS.
COMMON_KEYS = frozenset(
    (
        "_block_types activation_function activation_situ_beta activation_sparsity_pattern adapter_rank "
        "add_bias_linear add_full_attention_sink_bias add_qkv_bias add_swa_attention_sink_bias alibi altup_num_inputs "
        "attention_bias attention_heads attention_hidden_size attention_k_eq_v attention_other_setting "
        "attention_output_gate attention_value_scale attn_config attn_output_gate attn_res_block_size attn_rotary_emb "
        "attn_scale attn_temperature_tuning audio_config bias block_auto_adjust_ff_dim block_dim block_ff_dim "
        "block_ffn_dim_multiplier block_multiple_of block_size block_types chunk_size context_length "
        "context_window_size conv1d_width d_ff d_inner d_kv d_model decoder_attention_heads decoder_ffn_dim "
        "decoder_layers dense_intermediate_size dff dim do_layer_norm_before dtype embedding_size enable_moe_block "
        "encoder_attention_heads encoder_ffn_dim encoder_layers expand expansion_ratio expert_dtype "
        "expert_layer_offset expert_layer_period feed_forward_proj ffn_config ffn_dim ffn_dim_divisor ffn_hidden_size "
        "ffn_multipliers ffn_with_glu first_k_dense_replace floor_scale full_attention_interval "
        "full_attn_alpha_factor full_attn_beta_factor full_attn_idxs global_rope_theta hc_eps hc_mult "
        "hc_sinkhorn_iters head_size head_size_divisor hidden_act hidden_dim hidden_size hidden_size_per_layer_input "
        "indexer_rope_interleave indexer_types inner_group_num interleave_moe_layer_step intermediate_size "
        "intermediate_size_mlp is_decoder is_encoder_decoder latent_moe_use_norm laurel_rank layer_norm_eps "
        "layer_norm_epsilon layernorm_epsilon layers_block_type learned_pos_emb lm_head_bias local_rope_theta "
        "logits_soft_cap lru_width max_context_length max_position_embeddings max_seq_len max_source_positions "
        "max_target_positions mixer_rms_eps mla_use_nope mla_use_output_gate mlp_bias mlp_only_layers model_dim "
        "model_max_length model_type moe_intermediate_size moe_latent_size moe_layer_freq moe_layers moe_layers_enum "
        "moe_num_experts moe_renormalize moe_router_activation_func moe_shared_expert_intermediate_size moe_top_k "
        "mtp_layers_block_type mtp_num_hidden_layers n_ctx n_embd n_embed n_groups n_head n_head_kv n_heads n_inner "
        "n_layer n_layers n_positions n_routed_experts n_shared_experts new_decoder_architecture no_bias "
        "no_rope_layer_interval no_rope_layers norm_eps norm_topk_prob normalization_function "
        "normalize_qk_projections num_attention_groups num_attention_heads num_attention_heads_per_layer "
        "num_decoder_layers num_dense_layers num_expert_group num_experts num_experts_per_tok num_experts_per_token "
        "num_global_key_value_heads num_gqa_groups num_hash_layers num_heads num_hidden_groups num_hidden_layers "
        "num_layers num_ln_in_parallel_attn num_local_experts num_mel_bins num_mem_blocks num_mtp_modules "
        "num_nextn_predict_layers num_query_groups num_query_heads num_shared_experts num_sliding_attention_heads "
        "num_transformer_layers o_groups parallel_attn partial_rotary_factor partial_rotary_factors pos_att_type "
        "position_biased_input position_embedding_type projectors_bias qk_norm_type qkv_bias qkv_multipliers "
        "qkv_proj_bias quantization_config query_pre_attn_scalar relative_attention relative_attention_max_distance "
        "relative_attention_num_buckets rescale_every rms_norm_eps rms_norm_eps_moe_gate rope_freq_constant "
        "rope_interleave rope_local_base_freq rope_max_length rope_parameters rope_ratio rope_scaling rope_theta "
        "rotary_dim rotary_emb_fraction routed_expert_hidden_size routed_scaling_factor scale_embedding seq_length "
        "share_expert_dim share_expert_dims share_input_output_layers shared_expert_intermediate_size "
        "shared_intermediate_size swa_num_attention_heads swa_rope_theta tie_embedding tie_word_embeddings "
        "time_step_rank top_k_experts topk_group torch_dtype type_vocab_size use_bias use_bidirectional_attention "
        "use_cache_kernel use_cache_quantization use_double_wide_mlp use_expert_bias use_grouped_topk "
        "use_head_wise_attn_gate use_long_context use_mem_eff_path use_mem_rope use_qk_norm "
        "use_shared_attention_adapter use_shared_mlp_adapter vision_config vocab_size vocab_size_per_layer_input "
        "word_embed_proj_dim yarn_only_types"
    ).split()
)

# Omni models have the configs of their towers inside this one.
_TOWERS = frozenset(("thinker_config", *TOWER_KEYS["vision"], *TOWER_KEYS["audio"]))

# Their code has the dimensions of the vision tower.
_WITH_HIDDEN_TOWERS = ("molmo",)

# Parts of key names under which published configs state facts about the cache. If a family's reader does not know such
# a key and its value is not null, false or empty, the key may change the bytes, so kvcalc reports an error rather than
# a wrong figure. These are plain substrings because a regular expression would be compiled at every start.
_CACHE_LIKE = (
    "window lora_rank head_dim num_kv num_key_v kv_head kv_shared shared_kv kv_share kv_channel layer_types "
    "attention_types attention_layers attention_chunk attn_layer index_ sparse compress multi_query _conv_ "
    "conv_ ssm state_size mamba linear_ block_configs cross_attention hybrid use_cla use_mla per_layer_config "
    "local_attention global_attn"
).split()


# Engines that read a config through Transformers' class (AutoConfig) ignore what it ignores: keys beside text_config
# that belong into it, and Gemma 4's sliding_window_pattern. They read MiMo's layers themselves.
_READING_CONFIGS = "config"


def read_config(config: Mapping[str, object], name: str, source: str, *, strict: bool = False) -> ModelSpec:
    """Return the ModelSpec for a config mapping. `name` and `source` say where the mapping came from.

    `strict` refuses every key that the family does not know, even one that cannot change the cache: in a preset, a
    misspelled key is a lost fact. Raises ModelError (exit 3) for an unknown model_type, a missing fact, or an unknown
    key that may change the cache.
    """
    spec = _read_any(config, name, source, strict)
    has_towers = not _TOWERS.isdisjoint(config) or config.get("model_type") in _WITH_HIDDEN_TOWERS
    return spec._replace(multimodal=config) if has_towers else spec


def _read_any(config: Mapping[str, object], name: str, source: str, strict: bool) -> ModelSpec:
    """The model of a config of any type: a language model's, or that of a wrapper around one."""
    outer = ConfigReader(config, name, source).text("model_type")
    module = _module_of(outer)
    if outer in FAMILIES or (module is not None and not is_remote(outer)):
        return _read(config, outer, str(module), name, source, strict)
    # Only a few models need this module. Importing it here keeps start-up fast for all others.
    from kvcalc.model.wrappers import REMOTE_WRAPPERS, WRAPPERS, language_model, without_flat_keys

    whole = without_flat_keys(config, outer) if module is None or outer == "llava" else None
    config, model_type = language_model(config, outer, name, reads_outer=module is not None)
    module = _module_of(model_type)
    if module is None:
        if outer in REFUSED:
            raise ModelError(f"{name}: model_type {outer}: {REFUSED[outer]}")
        known = (*known_types(), *WRAPPERS)
        hint = nearest(model_type, known) or (
            f"{len(known)} types are known; for a plain decoder, set model_type to generic"
        )
        raise ModelError(f"{name}: model_type {model_type!r} is not known", hint)
    spec = _read(config, model_type, module, name, source, strict)
    if whole is not None:
        spec = with_transformers_reading(spec, read_config(whole, name, source))
        spec = spec._replace(with_its_classes=(*spec.with_its_classes, _READING_CONFIGS))
        if spec.as_transformers is None:
            return spec
        # What reads such a config decides which model it is, so nothing can confirm the weights.
        reason = f"the weights of a flat {outer} config are not counted: Transformers builds another model from it, "
        reason += "which --engine transformers counts"
        return spec._replace(around=None, weights_reason=reason)
    return spec._replace(in_transformers=False) if is_remote(model_type) or outer in REMOTE_WRAPPERS else spec


def known_types() -> list[str]:
    """Return every supported model_type, without wrappers."""
    from kvcalc.model.families.decoder_table import model_types

    return [*FAMILIES, *REMOTE_FAMILIES, *model_types()]


def is_remote(model_type: str) -> bool:
    """Return whether models of this type are published with their own code."""
    if model_type in FAMILIES or model_type in REMOTE_FAMILIES:
        return model_type in REMOTE_FAMILIES
    from kvcalc.model.families.decoder_table import model_types, row

    return model_type in model_types() and bool(row(model_type).get("is_remote"))


def _module_of(model_type: str) -> str | None:
    found = FAMILIES.get(model_type) or REMOTE_FAMILIES.get(model_type)
    if found is None:
        from kvcalc.model.families.decoder_table import model_types

        found = "decoder" if model_type in model_types() else None
    return found


def _read(
    config: Mapping[str, object], model_type: str, module: str, name: str, source: str, strict: bool
) -> ModelSpec:
    family = import_module(f"kvcalc.model.families.{module}")
    keys = family.KEYS if hasattr(family, "KEYS") else family.known_keys(model_type)
    _refuse_unknown_keys(config, keys | COMMON_KEYS, name, model_type, strict)
    spec: ModelSpec = family.read(ConfigReader(config, name, source), model_type)
    if hasattr(family, "as_transformers"):
        seen = family.as_transformers(config)
        if seen != config:
            spec = with_transformers_reading(spec, family.read(ConfigReader(seen, name, source), model_type))
            if module == "gemma4":
                spec = spec._replace(with_its_classes=(*spec.with_its_classes, _READING_CONFIGS))
    return spec


def with_transformers_reading(spec: ModelSpec, other: ModelSpec) -> ModelSpec:
    """Return `spec` with the model that Transformers' class makes of the same config, if its caches differ."""
    if [*map(repr, cache_runs(spec))] == [*map(repr, cache_runs(other))]:
        return spec
    remark = "Transformers' class does not read all keys of this config; this is the model that it builds"
    return spec._replace(as_transformers=other._replace(remarks=(*other.remarks, remark)))


def _refuse_unknown_keys(
    config: Mapping[str, object], known: frozenset[str], name: str, model_type: str, strict: bool
) -> None:
    for key, value in config.items():
        if key in known:
            continue
        if strict:
            raise ModelError(f"{name}: {key!r} is not a key of model_type {model_type}", nearest(key, known))
        if value not in (None, False, "", [], {}) and any(part in key for part in _CACHE_LIKE):
            hint = "remove the key if you are sure that it does not change the cache"
            raise ModelError(
                f"{name}: {key!r} may change the cache, and kvcalc does not know it for {model_type}", hint
            )
