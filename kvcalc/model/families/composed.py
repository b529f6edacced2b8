"""Encoders and decoders of any two types in one model: each decoder layer also attends to the encoder's output."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from kvcalc.model.layers import Layer, group_layers
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, has_cross_attention


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read `decoder`, and add cross-attention with the decoder's heads to every layer that has none.

    Such a model sets is_decoder and add_cross_attention of its decoder. The weights are not counted. Source:
    EncoderDecoderModel, VisionEncoderDecoderModel and SpeechEncoderDecoderModel, Transformers 5.23.0.
    """
    decoder = dict(config.nested("decoder").config)
    if not decoder:
        raise ModelError(f"{config.name}: decoder is missing: {model_type} has its language model there")
    decoder["is_decoder"] = True
    decoder.pop("add_cross_attention", None)
    spec = read_config(decoder, config.name, config.source)
    if not has_cross_attention(spec):
        made: dict[int, Layer] = {}
        layers = []
        for group in spec.layers:
            layer = made.setdefault(id(group.layer), _with_cross_attention(group.layer))
            layers += [layer] * group.num_layers
        spec = spec._replace(layers=group_layers(layers))
    reason = f"the weights of model_type {model_type} are not counted"
    return spec._replace(model_type=model_type, around=None, weights_reason=reason)


def _with_cross_attention(layer: Layer) -> Layer:
    own = next(mixer for mixer in layer.mixers if isinstance(mixer, Attention))
    return layer._replace(mixers=(*layer.mixers, Attention(own.shape, is_cross=True)))
