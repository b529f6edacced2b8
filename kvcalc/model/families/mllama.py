"""Llama 3.2 Vision: a LLaMA with layers of cross-attention to an image, which keep nothing until there is one."""

from __future__ import annotations

from kvcalc.model.caches import Cache, CrossAttention
from kvcalc.model.families.grouped import GROUPED_KEYS, full_attention, grouped_shape
from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset((*GROUPED_KEYS, "cross_attention_layers", "cross_attention_hidden_size", "add_cross_attention"))

# Source: MllamaTextConfig, Transformers 5.23.0.
_DEFAULTS = {"num_key_value_heads": 8, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Layers of cross_attention_layers keep K and V of the image's tokens alone; those past the last are no layers.

    Source: MllamaTextModel, Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    full: tuple[Cache, ...] = (full_attention(shape),)
    cross: tuple[Cache, ...] = (CrossAttention(shape.num_kv_heads, shape.qk_head_dim, shape.v_head_dim),)
    crossing = config.integers("cross_attention_layers", most=MAX_LAYERS)
    layers = group_layers(cross if number in crossing else full for number in range(num_layers))
    return config.model(model_type, shape, layers, encoder_tokens=0)
