"""BART and its kin, and Whisper: encoder and decoder with biases and shifted norms throughout."""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.weights.tensors import (
    LOOKUP,
    OTHER,
    Block,
    ModelWeights,
    Weight,
    around,
    linear,
    norm,
    plain_mlp,
    unread,
)


class _Family(NamedTuple):
    """Defaults; learned rows of positions beyond the context (none: positions are computed); the norms of each stack.

    Source: the configuration and modelling files of Transformers 5.23.0.
    """

    vocab_size: int
    ffn_dim: int
    more_positions: int | None
    norms: tuple[str, ...]


_FAMILIES = {
    "bart": _Family(50265, 4096, 2, ("layernorm_embedding",)),
    "mbart": _Family(50265, 4096, 2, ("layernorm_embedding", "layer_norm")),
    "pegasus": _Family(50265, 4096, 0, ("layer_norm",)),
    "marian": _Family(58101, 4096, 0, ()),
    "m2m_100": _Family(128112, 4096, None, ("layer_norm",)),
    "whisper": _Family(51865, 1536, 0, ("layer_norm",)),
}


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """A decode step reads the decoder alone, but for the projections of the encoder's output, which ran before."""
    family = _FAMILIES[model_type]
    is_whisper = model_type == "whisper"
    defaults = {
        "vocab_size": family.vocab_size, "encoder_ffn_dim": family.ffn_dim, "decoder_ffn_dim": family.ffn_dim,
        "num_mel_bins": 80,
    }  # fmt: skip
    config = config.with_defaults(defaults)
    config.refuse("share_encoder_decoder_embeddings", "only one embedding is counted")
    width, vocab = config.integer("d_model", "hidden_size"), config.integer("vocab_size")
    stacks = []
    for stack in ("encoder", "decoder"):
        layers = range(config.integer(f"{stack}_layers", most=MAX_LAYERS))
        layer = _layer(width, config.integer(f"{stack}_ffn_dim"), stack == "decoder", key_bias=not is_whisper)
        outer = [norm(name, width, bias=True) for name in family.norms]
        rows = _positions(config, family, is_whisper, stack)
        if rows is not None:
            outer.append(Weight("embed_positions", rows, width, LOOKUP))
        if is_whisper and stack == "encoder":
            outer += _convolutions(width, config.integer("num_mel_bins"))
        stacks += [Block(f"model.{stack}.layers.{{}}.", layers, layer), Block(f"model.{stack}.", (0,), (*outer,))]
    encoder, decoder = [unread(block) for block in stacks[:2]], stacks[2:]
    tied = config.boolean("tie_word_embeddings", default=True)
    name = "model.decoder.embed_tokens" if is_whisper else "model.shared"
    embedding, ends = around(vocab, width, tied, embedding=name, head="proj_out" if is_whisper else "lm_head")
    return ModelWeights(embedding, tied, (*encoder, *decoder, ends))


def _layer(width: int, inner: int, is_decoder: bool, key_bias: bool) -> tuple[Weight, ...]:
    """Whisper's keys have no bias."""
    found = [
        *_attention("self_attn", width, key_bias),
        norm("self_attn_layer_norm", width, bias=True),
        *plain_mlp("fc1", "fc2", width, inner, bias=True),
        norm("final_layer_norm", width, bias=True),
    ]
    if is_decoder:
        query, key, value, output = _attention("encoder_attn", width, key_bias)
        found += [query, key._replace(read=0), value._replace(read=0), output]
        found.append(norm("encoder_attn_layer_norm", width, bias=True))
    return tuple(found)


def _attention(prefix: str, width: int, key_bias: bool) -> tuple[Weight, Weight, Weight, Weight]:
    return (
        linear(f"{prefix}.q_proj", width, width, bias=True),
        linear(f"{prefix}.k_proj", width, width, key_bias),
        linear(f"{prefix}.v_proj", width, width, bias=True),
        linear(f"{prefix}.out_proj", width, width, bias=True),
    )


def _positions(config: ConfigReader, family: _Family, is_whisper: bool, stack: str) -> int | None:
    if family.more_positions is None:
        return None
    if is_whisper:
        return config.integer("max_source_positions" if stack == "encoder" else "max_target_positions")
    return config.integer("max_position_embeddings") + family.more_positions


def _convolutions(width: int, bins: int) -> list[Weight]:
    """What turns the spectrum into the encoder's input: two convolutions of three columns, with biases."""
    return [
        Weight("conv1", width, 3 * bins, OTHER, bias=width),
        Weight("conv2", width, 3 * width, OTHER, bias=width),
    ]
