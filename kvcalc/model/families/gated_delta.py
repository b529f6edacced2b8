"""Gated delta nets, and attention in every fourth layer: Qwen3-Next, Qwen3.5, OLMo Hybrid and Qwen4-Exp."""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, moe, sparse_layers, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Indexer, Projections
from kvcalc.model.mixers.recurrent import Recurrence, delta_net
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp
from kvcalc.model.type_tables import defaults_of

# LaraMini's layers, which repeat every five (LaraMiniConfig, Transformers 5.24.0).
_LARA = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
# Whose weights are not counted: Mobius's layers share experts.
_UNCOUNTED = ("interns2_mobius_text", "lara_mini", "olmo_hybrid")
# In Qwen3.5 every layer has experts. In Qwen3-Next some layers may have none.
_EXPERTS = {
    "qwen3_next": Experts("num_experts", layers="step", gated_shared=True),
    "qwen3_5_moe_text": Experts("num_experts", gated_shared=True),
}


def read_gated_delta(config: ConfigReader, model_type: str) -> ModelSpec:
    """Qwen3-Next, Qwen3.5 and OLMo Hybrid: gated delta nets, and full attention in every fourth layer.

    Layers with full attention keep K and V. The others keep a state. LaraMini also has layers with a window.

    In Qwen's attention, the query projection also produces a gate for the output. Source: Qwen3NextAttention and
    Qwen3NextGatedDeltaNet, Transformers 5.23.0.
    """
    is_olmo, is_lara = model_type == "olmo_hybrid", model_type == "lara_mini"
    config = with_defaults(config, _olmo_defaults(config) if is_olmo else defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config, output_gate=not is_olmo and not is_lara)
    config.refuse_other("mamba_ssm_dtype", "float32")
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape, names=Projections(qk_norm="head")),),
        "linear_attention": (gated_delta_net(config, model_type, shape.hidden_size or 0),),
    }
    if is_lara:
        kept["sliding_attention"] = (Attention(shape, config.integer("sliding_window")),)
        kinds = config.strings("layer_types", num_layers, _LARA) or [_LARA[n % 5] for n in range(num_layers)]
    else:
        kinds = layer_types(config, num_layers)
    mixers = [kept[kind] for kind in kinds]
    body = None if model_type in _UNCOUNTED else lambda: _body(config, model_type, num_layers)
    return config.model(model_type, mixers, body, attention=shape)


def gated_delta_net(config: ConfigReader, model_type: str, width: int) -> Recurrence:
    """Return the delta net.

    Qwen3.5 has four input matrices. Qwen3-Next has two: one for queries, keys, values and gate, and one for beta and
    decay.
    """
    key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    values = value_heads * value
    channels = 2 * key_heads * key + values
    inputs = {"qkv": channels, "z": values, "b": value_heads, "a": value_heads}
    if model_type == "qwen3_next":
        inputs = {"qkvz": channels + values, "ba": 2 * value_heads}
    return delta_net(value_heads, key_heads, key, value, config.integer("linear_conv_kernel_dim"), width, inputs)


def _body(config: ConfigReader, model_type: str, num_layers: int) -> Body:
    """Source: Qwen3NextDecoderLayer and Qwen3_5DecoderLayer, Transformers 5.23.0."""
    width, rule = config.integer("hidden_size"), _EXPERTS.get(model_type)
    sparse: Collection[int] = () if rule is None else sparse_layers(config, rule, num_layers)
    dense = gated_mlp("mlp", width, config.integer("intermediate_size")) if len(sparse) < num_layers else ()
    return decoder_body(config, choose(num_layers, sparse, () if rule is None else moe(config, rule, width), dense))


def layer_types(
    config: ConfigReader, num_layers: int, *more: str, interval: str = "full_attention_interval"
) -> list[str]:
    """Return the config's list, else full attention in every so manieth layer, as the key `interval` says.

    `more` are other names of full attention in the list.
    """
    kinds = config.strings("layer_types", num_layers, ("linear_attention", "full_attention", *more))
    if kinds is not None:
        return kinds
    step = config.integer(interval)
    return ["full_attention" if (n + 1) % step == 0 else "linear_attention" for n in range(num_layers)]


def _olmo_defaults(config: ConfigReader) -> dict[str, object]:
    """Return the defaults of OLMo Hybrid.

    The delta net has as many heads as attention. Its keys are three quarters as wide as a head, and its values are
    twice as wide as the keys. Source: OlmoHybridConfig, Transformers 5.23.0.
    """
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    key_heads = config.optional_integer("linear_num_key_heads") or num_heads
    key = config.optional_integer("linear_key_head_dim") or int(0.75 * hidden_size / key_heads)
    return {
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads, "linear_key_head_dim": key, "linear_value_head_dim": 2 * key,
    }  # fmt: skip


def read_qwen4(config: ConfigReader, model_type: str) -> ModelSpec:
    """Qwen4-Exp: gated delta nets, attention with an indexer in every fourth layer, and features of n-grams.

    Layers with attention keep K and V and one index key per token. The others keep a state.

    A step reads indexer_budget tokens, and the tokens that do not fill a block of the indexer yet. The layers in
    ple_layer_ids, counted from 1, also have a convolution over all residual streams, which skips ngram_size tokens
    between its inputs, and keep the numbers of the last ngram_size - 1 tokens, of 64 bits. The weights are not counted.
    Source: Qwen4ExpTextConfig, Qwen4ExpTextQSAIndexer, Qwen4ExpTextNGramEmbedding and Qwen4ExpTextPLELayer,
    Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config, output_gate=True)
    width = shape.hidden_size or 0
    indexer = Indexer(config.integer("indexer_n_heads"), config.integer("indexer_head_dim"))
    read_tokens = config.integer("indexer_budget") + config.integer("indexer_compress_ratio") - 1
    full: tuple[Mixer, ...] = (Attention(shape, most_read_tokens=read_tokens, indexer=indexer),)
    delta = gated_delta_net(config, model_type, width)
    config.refuse_other("mamba_ssm_dtype", "float32")
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
