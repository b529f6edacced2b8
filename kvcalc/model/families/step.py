"""Step 3.5, 3.7 and 5: decoders whose layers with a window have more query heads than the others."""

from __future__ import annotations

from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe
from kvcalc.model.families.common import decoder_body
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """layer_types lists the layers with a window, which have more query heads.

    All layers have the same number of KV heads. Layers with a window differ only in their number of query heads.

    layer_types may include layers for multi-token prediction, which are not part of the model that decodes.
    Source: Step3p7TextConfig, Transformers 5.23.0; for Step 5, Step5Config and Step5Attention of vLLM 0.33.0. There,
    every second layer has a window by default, the first one included. Its sparse attention is refused by its keys.
    """
    if model_type == "step5":
        config = config.with_defaults({"head_dim": config.head_dim(
            config.integer("hidden_size"), config.integer("num_attention_heads")
        ), "num_attention_groups": 8})  # fmt: skip
    if not config.mentions("num_attention_groups"):
        config = config.with_defaults({"num_key_value_heads": 8})
    config = config.with_defaults({"head_dim": 128})
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads", "num_attention_groups"))
    head_dim = config.integer("head_dim")
    kinds = _kinds(config, model_type, num_layers)
    bias = config.boolean("attention_bias", default=False)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.integer("hidden_size"), rope_dim=head_dim,
        qkv_bias=bias, output_bias=bias, head_gate=config.boolean("use_head_wise_attn_gate", default=True),
    )  # fmt: skip
    names = Projections(qk_norm="head")
    full = windowed = (Attention(shape, names=names),)
    sliding_heads = _sliding_heads(config, num_heads, num_kv_heads)
    if "sliding_attention" in kinds:
        window = config.integer("sliding_window")
        windowed = (Attention(shape._replace(num_heads=sliding_heads), window, names=names),)
    mixers = [full if kind == "full_attention" else windowed for kind in kinds]
    body = None if model_type == "step5" else lambda: _body(config, num_layers)
    return config.model(model_type, mixers, body, attention=shape)


def _body(config: ConfigReader, num_layers: int) -> Body:
    """moe_layers_enum lists the layers with experts, by default all but the first three. Source: Step3p7TextConfig."""
    width = config.integer("hidden_size")
    first = config.integer("first_k_dense_replace", least=0) if config.has("first_k_dense_replace") else 3
    default = _listed_layers(config, num_layers) or range(min(first, num_layers), num_layers)
    stated = config.optional_integer("n_routed_experts", "num_local_experts", "moe_num_experts", "num_experts")
    sized = config.with_values({"n_routed_experts": stated or 288}).with_defaults({
        "num_experts_per_tok": config.optional_integer("moe_top_k") or 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": config.optional_integer("share_expert_dims") or 1280,
    })  # fmt: skip
    rule = Experts(
        "n_routed_experts", prefix="moe", shared=True, shared_inner="share_expert_dim", shared_name="share_expert",
    )  # fmt: skip
    bias = config.boolean("mlp_bias", default=False)
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"), bias)
    sparse = moe(sized, rule, width)
    return decoder_body(config, choose(num_layers, listed_sparse_layers(config, num_layers, default), sparse, dense))


def _listed_layers(config: ConfigReader, num_layers: int) -> list[int]:
    """The numbers in moe_layers_enum, which is a list or a text with commas; empty if the key is missing."""
    if config.is_list("moe_layers_enum"):
        return config.integers("moe_layers_enum", most=MAX_LAYERS)
    stated = {f"{number}": number for number in range(num_layers)}
    words = (config.word("moe_layers_enum") or "").replace(" ", "").split(",")
    return [stated[word] for word in words if word in stated]


def _kinds(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    allowed = ("full_attention", "sliding_attention")
    if not config.has("layer_types"):
        if model_type == "step5" and config.is_set("sliding_window"):
            return [allowed[number % 2 == 0] for number in range(num_layers)]
        return ["full_attention"] * num_layers
    listed = len(config.items("layer_types"))
    ahead = config.optional_integer("num_nextn_predict_layers", least=0) or 0
    kinds = config.strings("layer_types", num_layers + ahead if listed != num_layers else num_layers, allowed)
    return (kinds or [])[:num_layers]


def _sliding_heads(config: ConfigReader, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads of the layers with a window.

    attention_other_setting may also state KV heads and a head width. They must be the same as in the other layers.
    """
    other = config.nested("attention_other_setting")
    groups, width = other.optional_integer("num_attention_groups"), other.optional_integer("head_dim")
    if groups not in (None, num_kv_heads) or width not in (None, config.integer("head_dim")):
        raise config.error("attention_other_setting changes K and V of the sliding layers: not supported")
    heads = config.optional_integer("num_sliding_attention_heads") or other.optional_integer("num_attention_heads")
    config.check_groups(heads or num_heads, num_kv_heads)
    return heads or num_heads
