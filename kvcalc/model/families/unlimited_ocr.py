"""Unlimited-OCR: every layer keeps the whole prompt, and a window of what it generates."""

from __future__ import annotations

from kvcalc.model.families.common import grouped_shape
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset("num_key_value_heads head_dim sliding_window layer_types mlp_layer_types".split())

_KINDS = ("full_attention", "reference_sliding_attention")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The context is counted as a prompt, so all of its tokens are kept. The weights are not counted.

    Of the tokens that the model generates it keeps the last sliding_window ones. Source: UnlimitedOcrTextConfig and
    UnlimitedOcrDynamicReferenceSlidingWindowLayer, Transformers 5.23.0.
    """
    config = config.with_defaults({"num_attention_heads": 10, "num_key_value_heads": 10})
    num_layers = config.num_layers("num_hidden_layers")
    config.strings("layer_types", num_layers, _KINDS)
    shape = grouped_shape(config)
    return config.model(model_type, [(Attention(shape),)] * num_layers, attention=shape)
