"""DeepSeek-V2 and V3: multi-head latent attention in every layer."""

from __future__ import annotations

from kvcalc.model.caches import LatentAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, uniform_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim kv_lora_rank q_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim attention_bias rope_theta rope_scaling "
        "rope_parameters rope_interleave first_k_dense_replace moe_layer_freq moe_intermediate_size "
        "n_routed_experts n_shared_experts num_experts_per_tok num_nextn_predict_layers rms_norm_eps"
    ).split()
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """One latent of kv_lora_rank and one rotary key of qk_rope_head_dim a token and layer.

    A null q_lora_rank means an uncompressed query (V2-Lite). Next-token-prediction layers are not part of the model
    that decodes. Source: DeepSeek-V2 paper, section 2.1; DeepseekV3Attention, Transformers 5.23.0.
    """
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    rank = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim")
    attention = AttentionShape(
        num_heads, num_heads, config.integer("qk_nope_head_dim") + rope, config.integer("v_head_dim"),
        config.integer("hidden_size"), rope_dim=rope, rope_theta=config.number("rope_theta", default=10_000.0),
        kv_lora_rank=rank, q_lora_rank=config.optional_integer("q_lora_rank") or 0, qk_rope_head_dim=rope,
        qkv_bias=config.boolean("attention_bias", default=False),
        output_bias=config.boolean("attention_bias", default=False),
    )  # fmt: skip
    return ModelSpec(
        config.name, config.source, model_type, attention, uniform_layers(num_layers, LatentAttention(rank, rope)),
        config.optional_integer("max_position_embeddings"), config.torch_dtype(),
    )  # fmt: skip
