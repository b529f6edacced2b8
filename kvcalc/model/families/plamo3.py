"""PLaMo 3: seven of eight layers have a window."""

from __future__ import annotations

from kvcalc.model.families.common import grouped_shape
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset("num_key_value_heads head_dim window_size sliding_window sliding_window_pattern".split())

_DEFAULTS = {"num_key_value_heads": 4, "head_dim": 128, "window_size": 128, "sliding_window_pattern": 8}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every sliding_window_pattern-th layer keeps all tokens, and the others keep window_size tokens.

    Older configs state the window in sliding_window, for all layers or with null in the layers without one. The weights
    are not counted. Source: Plamo3Config, published with pfnet's PLaMo 3; Plamo3AttentionMixer, vLLM 0.33.0.
    """
    stated = config.config.get("sliding_window")
    if isinstance(stated, list):
        windows = {window for window in stated if window is not None}
        if len(windows) != 1:
            raise config.error("sliding_window: all layers with a window must have the same one")
        config = config.without("sliding_window").with_defaults({"sliding_window": windows.pop()})
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    window = config.optional_integer("sliding_window") or config.integer("window_size")
    full, windowed = (Attention(shape),), (Attention(shape, window),)
    step = config.integer("sliding_window_pattern")
    mixers = [full if (number + 1) % step == 0 else windowed for number in range(num_layers)]
    return config.model(model_type, mixers, attention=shape)
