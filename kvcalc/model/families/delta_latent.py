"""Ling 3 (bailing_hybrid) and GLM-5-Next: Kimi delta attention in most layers, and MLA in the others."""

from __future__ import annotations

from kvcalc.model.families.common import latent_shape
from kvcalc.model.families.deepseek import has_indexer
from kvcalc.model.families.kimi_linear import delta_attention, stated_delta_attention
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Indexer
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset(
    (
        "num_key_value_heads head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim "
        "v_head_dim linear_head_dim linear_num_heads linear_conv_kernel_dim linear_lower_bound linear_attn_config "
        "short_conv_kernel_size layer_group_size layer_types mlp_layer_types index_head_dim index_n_heads index_topk "
        "index_topk_freq index_skip_topk_offset index_topk_pattern index_kpool index_kpool_always_select_tail"
    ).split()
)

# Source: BailingHybridConfig and Glm5NextTextConfig, Transformers 5.23.0.
_DEFAULTS: dict[str, dict[str, object]] = {
    "bailing_hybrid": {
        "num_attention_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "layer_group_size": 6, "short_conv_kernel_size": 4,
    },
    "glm5_next_text": {
        "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 256, "v_head_dim": 256, "layer_group_size": 4, "linear_head_dim": 128,
        "linear_num_heads": 64, "linear_conv_kernel_dim": 4, "index_head_dim": 128, "index_n_heads": 32,
        "index_topk": 2048,
    },
}  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer_group_size-th layer keeps a latent and, in Ling 3, a rotary key. The others keep a state.

    In Ling 3, the delta attention has the heads of attention, of head_dim. Transformers overwrites head_dim when it
    saves a config, and adds linear_head_dim. GLM-5-Next has no rotary key and an indexer. The indexer pools keys by
    learned gates, and keeps the key, the gate and one flag of every token. Source: BailingHybridConfig,
    Glm5NextTextConfig and Glm5NextTextIndexer, Transformers 5.23.0.
    """
    is_glm = model_type == "glm5_next_text"
    stated = stated_delta_attention(config) if is_glm else {}
    config = config.with_defaults({**_DEFAULTS[model_type], **stated})
    if not is_glm:
        config = config.with_defaults({
            "linear_head_dim": config.config.get("head_dim") or 128,
            "linear_num_heads": config.integer("num_attention_heads"),
            "linear_conv_kernel_dim": config.integer("short_conv_kernel_size"),
        })  # fmt: skip
    num_layers = config.num_layers("num_hidden_layers")
    shape = latent_shape(config, least_rope=0)
    full = [Attention(shape)] * num_layers
    if is_glm:
        sparse = Attention(shape, most_read_tokens=config.integer("index_topk"))
        packed = Indexer(config.integer("index_n_heads"), 2 * config.integer("index_head_dim") + 1)
        indexed = sparse._replace(indexer=packed)
        full = [indexed if has else sparse for has in has_indexer(config, model_type, num_layers)]
    made: dict[int, tuple[Mixer, ...]] = {id(each): (each,) for each in full}
    delta: tuple[Mixer, ...] = (delta_attention(config, shape.hidden_size or 0),)
    kinds = _layer_types(config, num_layers)
    mixers = [delta if kind == "linear_attention" else made[id(full[number])] for number, kind in enumerate(kinds)]
    return config.model(
        model_type, mixers, attention=shape, positions=("max_position_embeddings", "model_max_length")
    )  # fmt: skip


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    kinds = config.strings("layer_types", num_layers, ("linear_attention", "full_attention", "indexed_attention"))
    if kinds is not None:
        return kinds
    step = config.integer("layer_group_size")
    return ["full_attention" if (number + 1) % step == 0 else "linear_attention" for number in range(num_layers)]
