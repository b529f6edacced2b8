"""RWKV-4: a state in every layer and no attention."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.families.grouped import no_attention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, uniform_layers

KEYS = frozenset("num_hidden_layers hidden_size attention_hidden_size context_length rescale_every".split())


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The last token of both blocks, for their shift by one, and numerator, denominator and maximum in fp32.

    Source: RwkvModel, Transformers 5.23.0. The state sets no limit to the context.
    """
    hidden_size = config.integer("hidden_size")
    width = config.optional_integer("attention_hidden_size") or hidden_size
    state = RecurrentState(2 * hidden_size, 2, 3 * width)
    num_layers = config.num_layers("num_hidden_layers")
    return config.model(model_type, no_attention(config), uniform_layers(num_layers, state), positions=())
