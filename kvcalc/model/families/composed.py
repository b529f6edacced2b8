"""Encoders and decoders of any two types in one model: each decoder layer also attends to the encoder's output."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from kvcalc.model.layers import Layer, group_layers
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, has_cross_attention

# Vision encoders -> the side of a patch if the config does not say it, and the tokens besides those of the patches.
# Source: the configuration and embedding classes of Transformers 5.23.0; tests/oracle runs them.
_PATCHES = {
    "beit": (16, 1), "clip_vision_model": (32, 1), "data2vec-vision": (16, 1), "deit": (16, 2), "dinov2": (14, 1),
    "dinov2_with_registers": (16, 1), "dinov3_vit": (16, 1), "ijepa": (16, 0), "siglip_vision_model": (16, 0),
    "vit": (16, 1), "vit_msn": (16, 1),
}  # fmt: skip
_REGISTERS = {"dinov2_with_registers": 4, "dinov3_vit": 0}
# These merge four patches into one between their stages, of which there are as many as `depths`.
_MERGING, _MERGING_PATCH, _DEPTHS = ("donut-swin", "swin", "swinv2"), 4, 4
_IMAGE_SIZE = 224


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read `decoder`, and add cross-attention with the decoder's heads to every layer that has none.

    Such a model sets is_decoder and add_cross_attention of its decoder. A vision encoder outputs the tokens of an image
    of the config's size, which is that of its preprocessor. The weights are not counted. Source:
    EncoderDecoderModel, VisionEncoderDecoderModel and SpeechEncoderDecoderModel, Transformers 5.23.0.
    """
    if not config.is_set("decoder"):
        raise ModelError(f"{config.name}: decoder is missing: {model_type} has its language model there")
    decoder = config.nested("decoder").without("add_cross_attention").with_values({"is_decoder": True})
    spec = read_config(decoder.config, config.name, config.source)
    if not has_cross_attention(spec):
        made: dict[int, Layer] = {}
        layers = []
        for group in spec.layers:
            layer = made.setdefault(id(group.layer), _with_cross_attention(group.layer))
            layers += [layer] * group.num_layers
        spec = spec._replace(layers=group_layers(layers))
    spec = spec._replace(encoder_tokens=_image_tokens(config.nested("encoder")) or spec.encoder_tokens)
    reason = f"the weights of model_type {model_type} are not counted"
    return spec._replace(model_type=model_type, around=None, weights_reason=reason)


def _image_tokens(encoder: ConfigReader) -> int | None:
    """The tokens of an image of the encoder's size. None if this is no vision encoder whose tokens are known."""
    kind = encoder.word("model_type")
    merges = kind in _MERGING
    if kind is None or (not merges and kind not in _PATCHES):
        return None
    patch, more = (_MERGING_PATCH, 0) if merges else _PATCHES[kind]
    patch = encoder.optional_integer("patch_size") or patch
    height, width = (side // patch for side in _sides(encoder))
    if merges:
        # A side is padded to whole patches, and before it is halved (maybe_pad of Swin).
        height, width = (-(-side // patch) for side in _sides(encoder))
        for _ in range(encoder.number_of("depths", _DEPTHS) - 1):
            height, width = (height + 1) // 2, (width + 1) // 2
    elif kind in _REGISTERS:
        registers = encoder.optional_integer("num_register_tokens", least=0)
        more += _REGISTERS[kind] if registers is None else registers
    return height * width + more


def _sides(encoder: ConfigReader) -> tuple[int, int]:
    """The height and the width of an image in pixels: one side, or both in a list."""
    sides = encoder.integer_or_list("image_size") or [_IMAGE_SIZE]
    if len(sides) > 2:
        raise encoder.error(f"image_size is {sides}: one side in pixels, or the height and the width")
    return sides[0], sides[-1]


def _with_cross_attention(layer: Layer) -> Layer:
    attention = next(mixer for mixer in layer.mixers if isinstance(mixer, Attention))
    return layer._replace(mixers=(*layer.mixers, Attention(attention.shape, is_cross=True)))
