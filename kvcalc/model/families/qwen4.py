"""Qwen4-Exp: gated delta nets, attention with an indexer in every fourth layer, and features of n-grams."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.families.common import grouped_shape
from kvcalc.model.families.gated_delta import gated_delta_net, layer_types
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Indexer
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

KEYS = frozenset(
    (
        "num_key_value_heads head_dim layer_types linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads indexer_n_heads indexer_kv_heads indexer_head_dim indexer_budget "
        "indexer_compress_ratio ple_conv_kernel_size number_of_conv_states"
    ).split()
)

# Source: Qwen4ExpTextConfig, Transformers 5.23.0.
_DEFAULTS = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "hc_count": 4, "ple_conv_kernel_size": 4, "ngram_size": 3,
}  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Layers with attention keep K and V and one index key per token. The others keep a state.

    A step reads indexer_budget tokens, and the tokens that do not fill a block of the indexer yet. The layers in
    ple_layer_ids, counted from 1, also have a convolution over all residual streams, which skips ngram_size tokens
    between its inputs, and keep the numbers of the last ngram_size - 1 tokens, of 64 bits. The weights are not counted.
    Source: Qwen4ExpTextConfig, Qwen4ExpTextQSAIndexer, Qwen4ExpTextNGramEmbedding and Qwen4ExpTextPLELayer,
    Transformers 5.23.0.
    """
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config, output_gate=True)
    width = shape.hidden_size or 0
    indexer = Indexer(config.integer("indexer_n_heads"), config.integer("indexer_head_dim"))
    read_tokens = config.integer("indexer_budget") + config.integer("indexer_compress_ratio") - 1
    full: tuple[Mixer, ...] = (Attention(shape, most_read_tokens=read_tokens, indexer=indexer),)
    delta = gated_delta_net(config, model_type, width)
    ngram = config.integer("ngram_size")
    # The inputs before the current one; `state_elements` are whole, `conv_kernel` would add the current one.
    streams = config.integer("hc_count") * width * (config.integer("ple_conv_kernel_size") - 1) * ngram
    more = Recurrence(RecurrentState(0, 1, streams, state_dtype=None), "none")
    numbers = Recurrence(RecurrentState(0, 1, 2 * (ngram - 1), state_dtype="fp32"), "none")  # 64 bits are 2 x 32
    plain: tuple[Mixer, ...] = (delta,)
    extended: tuple[Mixer, ...] = (delta, more, numbers)
    with_ngrams = config.integers("ple_layer_ids", least=1, most=num_layers)
    kinds = layer_types(config, num_layers, "indexed_attention")
    if any(kinds[number - 1] != "linear_attention" for number in with_ngrams):
        raise config.error("ple_layer_ids: only layers with linear_attention may have n-grams")
    mixers = [
        full if kind != "linear_attention" else extended if number in with_ngrams else plain
        for number, kind in enumerate(kinds, 1)
    ]
    return config.model(model_type, mixers, attention=shape)
