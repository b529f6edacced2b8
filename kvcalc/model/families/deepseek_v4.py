"""DeepSeek-V4: a short window in every layer, and compressed entries of all that came before in most."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.caches import Cache, CompressedAttention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import AttentionShape, ModelSpec, group_layers

KEYS = frozenset(
    (
        "num_hidden_layers num_attention_heads num_key_value_heads hidden_size head_dim q_lora_rank o_lora_rank "
        "o_groups qk_rope_head_dim sliding_window compress_ratios compress_rates compress_rate_csa compress_rate_hca "
        "compress_rope_theta layer_types mlp_layer_types index_head_dim index_n_heads index_topk num_hash_layers "
        "hc_mult hc_eps hc_sinkhorn_iters attention_bias rope_theta rope_scaling rope_parameters "
        "partial_rotary_factor moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok "
        "num_nextn_predict_layers rms_norm_eps expert_dtype"
    ).split()
)

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Source: DeepseekV4Config, Transformers 5.23.0.
_DEFAULTS = {"sliding_window": 128, "head_dim": 512, "index_head_dim": 128, "index_topk": 512}
_RATES = {_SPARSE: 4, _HEAVY: 128}
_BY_RATIO = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V are one vector a token, shared by all heads; compress_ratios says how many tokens make an entry.

    Next-token-prediction layers, which compress_ratios may count, are not part of the model that decodes.
    Source: DeepSeek-V4's paper, section 2.3; DeepseekV4Attention, Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.num_layers("num_hidden_layers")
    num_heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    if config.optional_integer("num_key_value_heads") not in (None, 1):
        raise config.error("num_key_value_heads is not 1: K and V are shared by all heads in this family")
    window, rates = config.integer("sliding_window"), compress_rates(config)
    kept: dict[str, tuple[Cache, ...]] = {
        _WINDOW: (CompressedAttention(window, head_dim),),
        _HEAVY: (CompressedAttention(window, head_dim, rates[_HEAVY]),),
        _SPARSE: (
            CompressedAttention(
                window, head_dim, rates[_SPARSE], config.integer("index_head_dim"), config.integer("index_topk")
            ),
        ),
    }
    shape = AttentionShape(
        num_heads, 1, head_dim, head_dim, config.integer("hidden_size"),
        q_lora_rank=config.optional_integer("q_lora_rank") or 0,
        rope_dim=config.optional_integer("qk_rope_head_dim") or 0,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    return config.model(model_type, shape, group_layers(kept[kind] for kind in layer_kinds(config, num_layers)))


def compress_rates(config: ConfigReader) -> dict[str, int]:
    """Tokens an entry stands for, by kind of layer: compress_rates, or the older key of each."""
    stated = config.config.get("compress_rates")
    if stated is not None and not isinstance(stated, Mapping):
        raise config.error("compress_rates must map kinds of layers to rates")
    rates = ConfigReader({**_RATES, **(stated or {})}, f"{config.name}: compress_rates", config.source)
    return {
        _SPARSE: config.optional_integer("compress_rate_csa") or rates.integer(_SPARSE),
        _HEAVY: config.optional_integer("compress_rate_hca") or rates.integer(_HEAVY),
    }


def layer_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """The kind of every layer: listed, by compress_ratios (0, 4 or 128), or V4-Pro's order."""
    kinds = config.strings("layer_types", num_layers, tuple(_BY_RATIO.values()))
    if kinds is not None:
        return kinds
    ratios = config.config.get("compress_ratios")
    if ratios is None and config.config.get("model_type") != "deepseek_v4":
        raise config.error("compress_ratios is missing")
    if ratios is None:
        return [_HEAVY if number < 2 or number % 2 else _SPARSE for number in range(num_layers)]
    if not isinstance(ratios, list) or len(ratios) < num_layers or any(ratio not in _BY_RATIO for ratio in ratios):
        raise config.error(f"compress_ratios must give 0, 4 or 128 for each of {num_layers} layers")
    return [_BY_RATIO[ratio] for ratio in ratios[:num_layers]]
