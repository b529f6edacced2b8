"""Step 3.5, 3.7 and 5: layer_types lists the layers with a window, which have more query heads."""

from __future__ import annotations

from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """All layers have the same number of KV heads. Layers with a window differ only in their number of query heads.

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
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.integer("hidden_size"), rope_dim=head_dim
    )
    full = windowed = (Attention(shape),)
    sliding_heads = _sliding_heads(config, num_heads, num_kv_heads)
    if "sliding_attention" in kinds:
        windowed = (Attention(shape._replace(num_heads=sliding_heads), config.integer("sliding_window")),)
    return config.model(model_type, [full if kind == "full_attention" else windowed for kind in kinds], attention=shape)


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
