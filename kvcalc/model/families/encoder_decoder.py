"""Encoder-decoder models: every decoder layer keeps K and V of its own tokens and of the encoder's output."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Block, Weight, around, linear, lookup, norm, other, plain_mlp, unread
from kvcalc.model.type_tables import defaults_of

# The norms of each stack in a family like BART. Source: the modelling files of Transformers 5.23.0.
_NORMS: dict[str, tuple[str, ...]] = {
    "bart": ("layernorm_embedding",), "mbart": ("layernorm_embedding", "layer_norm"), "pegasus": ("layer_norm",),
    "marian": (), "m2m_100": ("layer_norm",), "whisper": ("layer_norm",),
}  # fmt: skip
# The rows by which the learned table of positions exceeds the context: 0 for most, None if positions are computed.
_MORE_POSITIONS = {"bart": 2, "mbart": 2, "m2m_100": None}


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of every head, for the decoder's tokens and, once, for the encoder's output.

    T5 states the width of a head (d_kv), and may have fewer decoder layers than encoder layers. Its positions are
    relative, so n_positions is not a limit. Whisper's encoder always outputs max_source_positions tokens. Source:
    T5Config, BartConfig and WhisperConfig, Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    return _read_bart(config, model_type) if model_type in _NORMS else _read_t5(config, model_type)


def _read_t5(config: ConfigReader, model_type: str) -> ModelSpec:
    num_heads, hidden_size = config.integer("num_heads"), config.integer("d_model", "hidden_size")
    layers = "num_decoder_layers" if config.is_set("num_decoder_layers") else "num_layers"
    num_layers = config.num_layers(layers)
    width = config.integer("d_kv")
    shape = AttentionShape(num_heads, num_heads, width, width, hidden_size)
    own = Attention(shape, names=Projections("layer.0.SelfAttention", "q", "k", "v", "o"))
    if str(next(iter(config.items("architectures")), "")).endswith("T5EncoderModel"):
        stacked = config.num_layers("num_layers")
        return config.model(
            model_type,
            [(own,)] * stacked,
            lambda: _t5_encoder(config, model_type, stacked),
            positions=(),
            is_encoder=True,
        )
    names = Projections("layer.1.EncDecAttention", "q", "k", "v", "o", reads_encoder=True)
    mixers = (own, Attention(shape, is_cross=True, names=names))
    return config.model(
        model_type, [mixers] * num_layers, lambda: _t5_body(config, model_type, own, num_layers), positions=()
    )


def _t5_body(config: ConfigReader, model_type: str, attention: Attention, decoder_layers: int) -> Body:
    """A decode step reads only the decoder.

    Positions are a bias of the scores: umT5 has a table in every layer, the others only in the first layer of each
    stack. If the config does not tie the head, as in the published T5 1.1, Transformers ties it anyway, so the weights
    are not counted. Source: T5ForConditionalGeneration and UMT5ForConditionalGeneration, Transformers 5.23.0.
    """
    if not config.boolean("tie_word_embeddings", default=True):
        raise ModelError(
            f"{config.name}: tie_word_embeddings is false, but Transformers ties them: weights are not counted"
        )
    num_layers = config.num_layers("num_layers", "num_hidden_layers")
    width, mlp, norms, positions = _t5_parts(config)
    every = model_type == "umt5"
    encoder, decoder = "encoder.block.{}.", "decoder.block.{}."
    blocks = (
        unread(Block(encoder, range(num_layers), (*attention.weights, *mlp, *norms[:2]))),
        unread(Block(encoder, range(num_layers if every else 1), positions)),
        unread(Block("encoder.", (0,), (norm("final_layer_norm", width),))),
        Block(decoder, range(decoder_layers if every else 1), positions),
    )
    last = norm("decoder.final_layer_norm", width)
    outer = around(config.integer("vocab_size"), width, True, last, embedding="shared", prefix=decoder, blocks=blocks)
    return Body(outer, [mlp] * decoder_layers, norms)


def _t5_encoder(config: ConfigReader, model_type: str, num_layers: int) -> Body:
    """The encoder alone. Source: T5EncoderModel and UMT5EncoderModel, Transformers 5.23.0."""
    width, mlp, norms, positions = _t5_parts(config)
    prefix = "encoder.block.{}."
    tables = Block(prefix, range(num_layers if model_type == "umt5" else 1), positions)
    last = norm("encoder.final_layer_norm", width)
    outer = around(config.integer("vocab_size"), width, True, last, embedding="shared", prefix=prefix, blocks=(tables,))
    return Body(outer, [mlp] * num_layers, norms[:2])


def _t5_parts(config: ConfigReader) -> tuple[int, tuple[Weight, ...], tuple[Weight, ...], tuple[Weight, ...]]:
    """The width, a layer's MLP, a decoder layer's norms (an encoder layer has the first two), and the positions."""
    width, heads = config.integer("d_model", "hidden_size"), config.integer("num_heads", "num_attention_heads")
    inner = config.integer("d_ff")
    names = ("wi_0", "wi_1") if config.text("feed_forward_proj").startswith("gated-") else ("wi",)
    mlp = (
        *(linear(f"DenseReluDense.{name}", width, inner) for name in names),
        linear("DenseReluDense.wo", inner, width),
    )
    norms = tuple(norm(f"layer.{place}.layer_norm", width) for place in range(3))
    positions = other("relative_attention_bias", config.integer("relative_attention_num_buckets"), heads)
    return width, mlp, norms, (positions,)


def _read_bart(config: ConfigReader, model_type: str) -> ModelSpec:
    is_whisper = model_type == "whisper"
    num_heads, hidden_size = config.integer("decoder_attention_heads"), config.integer("d_model", "hidden_size")
    num_layers, width = config.num_layers("decoder_layers"), config.head_dim(hidden_size, num_heads)
    shape = AttentionShape(num_heads, num_heads, width, width, hidden_size, qkv_bias=True, output_bias=True)
    # Whisper's keys have no bias.
    names = Projections(output="out_proj", key_bias=not is_whisper)
    own = Attention(shape, names=names)
    cross = Attention(shape, is_cross=True, names=names._replace(prefix="encoder_attn", reads_encoder=True))
    fixed = config.integer("max_source_positions") if is_whisper else None
    return config.model(
        model_type,
        [(own, cross)] * num_layers,
        lambda: _bart_body(config, model_type, own, num_layers),
        positions=("max_target_positions",) if is_whisper else ("max_position_embeddings",),
        encoder_tokens=fixed,
        has_fixed_encoder=is_whisper,
    )


def _bart_body(config: ConfigReader, model_type: str, attention: Attention, num_layers: int) -> Body:
    """A decode step reads only the decoder. All projections have biases, and all norms have a shift."""
    is_whisper, more = model_type == "whisper", _MORE_POSITIONS.get(model_type, 0)
    config.refuse("share_encoder_decoder_embeddings", "only one embedding is counted")
    width = config.integer("d_model", "hidden_size")
    encoder = [norm(name, width, bias=True) for name in _NORMS[model_type]]
    decoder = list(encoder)
    if more is not None:
        for outer, key in ((encoder, "max_source_positions"), (decoder, "max_target_positions")):
            rows = config.integer(key if is_whisper else "max_position_embeddings") + more
            outer.append(lookup("embed_positions", rows, width))
    if is_whisper:
        # Two convolutions with a kernel of three and biases turn the spectrogram into the encoder's input.
        encoder += [
            other("conv1", width, 3 * config.integer("num_mel_bins"), bias=width),
            other("conv2", width, 3 * width, bias=width),
        ]
    norms = ("self_attn_layer_norm", "final_layer_norm", "encoder_attn_layer_norm")
    stacked = tuple(norm(name, width, bias=True) for name in norms)
    layers = range(config.integer("encoder_layers", most=MAX_LAYERS))
    blocks = (
        unread(Block("model.encoder.layers.{}.", layers, (
            *attention.weights, *_mlp(config, width, "encoder_ffn_dim"), *stacked[:2],
        ))),
        unread(Block("model.encoder.", (0,), tuple(encoder))),
        Block("model.decoder.", (0,), tuple(decoder)),
    )  # fmt: skip
    tied = config.boolean("tie_word_embeddings", default=True)
    outside = around(
        config.integer("vocab_size"), width, tied, blocks=blocks, prefix="model.decoder.layers.{}.",
        embedding="model.decoder.embed_tokens" if is_whisper else "model.shared",
        head="proj_out" if is_whisper else "lm_head",
    )  # fmt: skip
    return Body(outside, [_mlp(config, width, "decoder_ffn_dim")] * num_layers, stacked)


def _mlp(config: ConfigReader, width: int, key: str) -> tuple[Weight, ...]:
    return plain_mlp("fc1", "fc2", width, config.integer(key), bias=True)
