"""HRM-Text: two stacks of layers that run several times for each token, with a cache for every pass."""

from __future__ import annotations

from kvcalc.model.families.common import grouped_shape
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset("num_key_value_heads head_dim num_layers_per_stack H_cycles L_cycles L_bp_cycles prefix_lm".split())


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A token passes the stacks H_cycles x (L_cycles + 1) times, and every pass of a layer keeps its own K and V.

    A saved config has the number of passes in num_hidden_layers and the size of a stack in num_layers_per_stack. The
    weights are not counted. Source: HrmTextConfig, Transformers 5.23.0.
    """
    config = config.with_defaults({"num_attention_heads": 12, "head_dim": 128, "H_cycles": 2, "L_cycles": 3})
    passes = config.num_layers("num_hidden_layers")
    if config.config.get("num_layers_per_stack") is None:
        passes *= config.integer("H_cycles", most=MAX_LAYERS) * (config.integer("L_cycles", most=MAX_LAYERS) + 1)
    shape = grouped_shape(config)
    return config.model(model_type, [(Attention(shape),)] * passes, attention=shape)
