"""RecurrentGemma, RWKV and xLSTM: layers with a state that is no Mamba's. Their weights are not counted."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.families.common import grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.type_tables import defaults_of

_PATTERN = ("recurrent", "recurrent", "attention")


def read_recurrent_gemma(config: ConfigReader, model_type: str) -> ModelSpec:
    """RecurrentGemma (Griffin): two layers with a gated linear recurrence, then one layer with windowed attention.

    The recurrence keeps one number per channel, in fp32, and the last inputs of its convolution.

    Source: RecurrentGemmaRglru and RecurrentGemmaRecurrentBlock, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    shape = grouped_shape(config)
    lru_width = config.optional_integer("lru_width") or config.integer("hidden_size")
    state = RecurrentState(lru_width, config.integer("conv1d_width"), lru_width)
    kept: dict[str, tuple[Mixer, ...]] = {
        "recurrent": (Recurrence(state, "selective", k_width=1),),
        "attention": (Attention(shape, config.integer("attention_window_size")),),
    }
    pattern = [str(kind) for kind in config.items("block_types") or config.items("_block_types")] or [*_PATTERN]
    if set(pattern) - set(kept):
        raise config.error(f"block_types may contain only {' and '.join(kept)}")
    num_layers = config.num_layers("num_hidden_layers")
    kinds = (pattern[number % len(pattern)] for number in range(num_layers))
    return config.model(model_type, [kept[kind] for kind in kinds], attention=shape)


def read_rwkv(config: ConfigReader, model_type: str) -> ModelSpec:
    """RWKV-4 and RWKV-6: every layer has a state, and there is no attention.

    A layer keeps the last token of both of its blocks, for their shift by one token, and a state in fp32.

    The state is a numerator, a denominator and a maximum (RWKV-4), or one matrix of head_size x head_size per head
    (RWKV-6). It does not limit the context. Source: RwkvModel, Transformers 5.23.0; for RWKV-6, token_shift_count and
    wkv_head_size in llama-hparams.cpp, in the version that llama-cpp-python 0.3.36 ships.
    """
    hidden_size = config.integer("hidden_size")
    width = config.optional_integer("attention_hidden_size") or hidden_size
    if model_type == "rwkv6":
        # Required, because another library's configs of this type have num_heads and expand_k instead.
        per_channel = config.integer("head_size")
        if width % per_channel:
            raise ModelError(
                f"{config.name}: attention_hidden_size {width:,} is not a multiple of head_size {per_channel:,}"
            )
    else:
        per_channel = 3
    state = RecurrentState(2 * hidden_size, 2, per_channel * width)
    num_layers = config.num_layers("num_hidden_layers")
    spec = config.model(model_type, [(Recurrence(state),)] * num_layers, positions=())
    return spec._replace(in_transformers=model_type == "rwkv")


_MULTIPLE = 64


def read_xlstm(config: ConfigReader, model_type: str) -> ModelSpec:
    """xLSTM: a matrix memory per head in every layer, and no attention.

    A layer keeps, per head, a matrix of keys and values, a vector that normalizes it, and the largest gate.

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
