"""RWKV-4 and RWKV-6: a state in every layer and no attention."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS: frozenset[str] = frozenset()


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """The last token of both blocks, for their shift by one, and in fp32 numerator, denominator and maximum (RWKV-4) or
    a matrix of head_size x head_size for every head (RWKV-6).

    Source: RwkvModel, Transformers 5.23.0; RWKV-6: token_shift_count and wkv_head_size, llama-hparams.cpp as it stands
    in llama-cpp-python 0.3.36. The state sets no limit to the context.
    """
    hidden_size = config.integer("hidden_size")
    width = config.optional_integer("attention_hidden_size") or hidden_size
    if model_type == "rwkv6":
        # Required: another library's configs of this type have num_heads and expand_k in its place.
        per_channel = config.integer("head_size")
        if width % per_channel:
            raise ModelError(
                f"{config.name}: attention_hidden_size {width:,} is no multiple of head_size {per_channel:,}"
            )
    else:
        per_channel = 3
    state = RecurrentState(2 * hidden_size, 2, per_channel * width)
    num_layers = config.num_layers("num_hidden_layers")
    spec = config.model(model_type, [(Recurrence(state),)] * num_layers, positions=())
    return spec._replace(in_transformers=model_type == "rwkv")
