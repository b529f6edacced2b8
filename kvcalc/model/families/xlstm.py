"""xLSTM: a matrix memory per head in every layer, and no attention."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset("num_heads qk_dim_factor v_dim_factor inference_state_dtype".split())

_MULTIPLE = 64


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A layer keeps, per head, a matrix of keys and values, a vector that normalizes it, and the largest gate.

    They are in the model's dtype. Keys are half as wide as the model by default, and values as wide. Source:
    xLSTMConfig and xLSTMCache, Transformers 5.23.0.
    """
    num_layers, width = config.num_layers("num_hidden_layers", "num_blocks"), config.integer("hidden_size")
    heads = config.optional_integer("num_heads") or 8
    keys = _rounded(width * config.number("qk_dim_factor", default=0.5)) // heads
    values = _rounded(width * config.number("v_dim_factor", default=1.0)) // heads
    state = RecurrentState(0, 1, heads * (keys * values + keys + 1), state_dtype=None, num_heads=heads)
    mixers: tuple[Mixer, ...] = (Recurrence(state, "", heads, heads, keys, values),)
    return config.model(model_type, [mixers] * num_layers)


def _rounded(width: float) -> int:
    """Round up to a multiple of 64, like round_up_to_next_multiple_of of Transformers."""
    return int((width + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE)
