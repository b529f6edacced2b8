"""Liquid's LFM2 and LFM3: short convolutions, and attention in some layers, which may have a window in LFM3."""

from __future__ import annotations

from kvcalc.model.experts import Experts, choose, moe
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Projections
from kvcalc.model.mixers.recurrent import short_convolution
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, linear
from kvcalc.model.type_tables import defaults_of

_NAMES = Projections(output="out_proj", qk_norm="head", qk_norms=("q_layernorm", "k_layernorm"))
_NAMES_3 = Projections(qk_norm="head")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A convolution over the hidden size keeps its last inputs but no state. Source: Lfm2ShortConv, Transformers."""
    config = config.with_defaults(defaults_of(model_type))
    if model_type != "lfm3":
        config.refuse("sliding_window", "windows are not supported for this family")
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    hidden_size = config.integer("hidden_size")
    for key in ("conv_dim", "conv_dim_out"):
        if config.optional_integer(key) not in (None, hidden_size):
            raise config.error(f"{key} differs from hidden_size {hidden_size}: not supported")
    # The projections have no biases, whatever attention_bias says.
    shape = shape._replace(qkv_bias=False, output_bias=False, head_gate=model_type == "lfm3")
    bias = config.boolean("conv_bias", default=False)
    names = _NAMES_3 if model_type == "lfm3" else _NAMES
    kept: dict[str, tuple[Mixer, ...]] = {
        "conv": (short_convolution(hidden_size, config.integer("conv_L_cache"), bias),),
        "full_attention": (Attention(shape, names=names),),
    }
    if model_type == "lfm3":
        kept["sliding_attention"] = (Attention(shape, config.integer("sliding_window"), names=names),)
    mixers = [kept[kind] for kind in _layer_kinds(config, model_type, num_layers)]
    return config.model(model_type, mixers, lambda: _body(config, model_type, num_layers), attention=shape)


def _body(config: ConfigReader, model_type: str, num_layers: int) -> Body:
    """The first layers have an MLP. In LFM2-MoE the later layers have experts.

    Source: Lfm2DecoderLayer, Lfm2MoeDecoderLayer and Lfm3DecoderLayer, Transformers 5.23.0.
    """
    width, inner = config.integer("hidden_size"), _inner(config, model_type)
    dense: tuple[Weight, ...] = (
        linear("feed_forward.w1", width, inner),
        linear("feed_forward.w3", width, inner),
        linear("feed_forward.w2", inner, width),
    )
    mlps = [dense] * num_layers
    if model_type == "lfm2_moe":
        first = min(config.integer("num_dense_layers", least=0), num_layers)
        rule = Experts("num_experts", prefix="feed_forward", names=("w1", "w3", "w2"))
        mlps = choose(num_layers, range(first, num_layers), moe(config, rule, width), dense)
    tied = config.boolean("tie_embedding", default=config.boolean("tie_word_embeddings", default=True))
    untied = config.without("tie_word_embeddings")
    norms = ("operator_norm", "ffn_norm", *(("post_operator_norm", "post_ffn_norm") if model_type == "lfm3" else ()))
    return decoder_body(untied, mlps, norms=norms, last="model.embedding_norm", tied=tied)


def _inner(config: ConfigReader, model_type: str) -> int:
    """Return the inner width of the MLP.

    LFM2 uses two thirds of the stated width, times a factor, rounded up to a multiple. Source: Lfm2MLP.
    """
    if model_type != "lfm2":
        return config.integer("intermediate_size")
    inner = config.optional_integer("block_ff_dim") or config.optional_integer("intermediate_size") or 12288
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = 2 * inner // 3
    if config.mentions("block_ffn_dim_multiplier") and not config.has("block_ffn_dim_multiplier"):
        return inner
    multiple = config.optional_integer("block_multiple_of") or 256
    inner = int(config.number("block_ffn_dim_multiplier", default=1.0) * inner)
    return -(-inner // multiple) * multiple


def _layer_kinds(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """Return the config's list, else the family's pattern."""
    windows = ("sliding_attention",) if model_type == "lfm3" else ()
    kinds = config.strings("layer_types", num_layers, ("conv", "full_attention", *windows))
    return _pattern(config, model_type, num_layers) if kinds is None else kinds


def _pattern(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """Return the kinds of layers for a config without layer_types.

    LFM2 lists its attention layers; without the list, all layers have attention. LFM3 repeats a pattern of four layers.
    """
    if model_type == "lfm3":
        by_rest = {2: "full_attention", 0: "sliding_attention"}
        return ["conv" if n == 0 else by_rest.get(n % 4, "conv") for n in range(num_layers)]
    if model_type == "lfm2_moe":
        raise config.error("layer_types is missing")
    if not config.has("full_attn_idxs"):
        return ["full_attention"] * num_layers
    listed = config.integers("full_attn_idxs", most=num_layers - 1)
    return ["full_attention" if number in listed else "conv" for number in range(num_layers)]
