"""The parameters of vision towers that several models share: SigLIP, CLIP and Pixtral.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class).
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, number_of, patches, projection, side


def patches_3d(vision: ConfigReader, width: int, patch: int) -> int:
    """A convolution over patches of two frames, without its bias."""
    size, frames = integer(vision, patch, "patch_size"), integer(vision, 2, "temporal_patch_size")
    return integer(vision, 3, "in_channels", "in_chans", "num_channels") * frames * size * size * width


def vit(
    vision: ConfigReader, number: int = 12, width: int = 768, inner: int = 3072, depth: str = "num_hidden_layers"
) -> tuple[int, int, Counted]:
    """The width, the MLP's width, and the layers of a vision transformer with biases and layer norms in every layer.

    The sizes are the defaults of its class, and `depth` is its key for the number of layers.
    """
    width, inner = integer(vision, width, "hidden_size"), integer(vision, inner, "intermediate_size")
    return width, inner, vit_layers(num_layers(vision, number, depth), width, inner)


def vit_layers(number: int, width: int, inner: int) -> Counted:
    """Layers with biases and layer norms."""
    return layers(number, width, inner, biases=5 * width + inner, norms=4 * width)


def siglip(vision: ConfigReader) -> Counted:
    """SigLIP, with its pooling head if vision_use_head is set. SigLIP 2 states its number of positions."""
    width, inner, body = vit(vision)
    number, patch = patches(vision, 224, 16)
    number = number_of(vision, number, "num_patches")
    whole = projection(integer(vision, 3, "num_channels") * patch * patch, width) + number * width + 2 * width
    if vision.boolean("vision_use_head", True):
        whole += width + projection(width, 3 * width) + projection(width, width) + 2 * width
        whole += projection(width, inner) + projection(inner, width)
    return added(body, (0, whole))


def clip(vision: ConfigReader) -> Counted:
    """CLIP: a class token, and norms before and after the layers."""
    width, _, body = vit(vision)
    number, patch = patches(vision, 224, 32)
    channels = integer(vision, 3, "num_channels")
    return added(body, (0, channels * patch * patch * width + (number + 2) * width + 4 * width))


def pixtral(vision: ConfigReader) -> Counted:
    """Pixtral: Llama's layers, without biases."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 4096, "intermediate_size")
    body = layers(num_layers(vision, 24, "num_hidden_layers"), width, inner, matrices=3, norms=2 * width)
    patch = side(vision, "patch_size", 16)
    return added(body, (0, integer(vision, 3, "num_channels") * patch * patch * width + width))


_BODIES = {
    "siglip_vision_model": siglip, "siglip2_vision_model": siglip, "clip_vision_model": clip, "pixtral": pixtral,
}  # fmt: skip


def body(vision: ConfigReader, default: str) -> Counted:
    """The tower of the type that its config names. Raises ModelError for a type that is not counted."""
    kind = vision.word("model_type") or default
    body = _BODIES.get(kind)
    if body is None:
        raise ModelError(f"the weights of a vision tower of type {kind[:80]} are not counted")
    return body(vision)


def body_width(vision: ConfigReader, default: str) -> int:
    """The width of that tower."""
    kind = vision.word("model_type") or default
    return integer(vision, 1024 if kind == "pixtral" else 768, "hidden_size")


def merger(vision: ConfigReader, width: int, text: int, norm: int) -> int:
    """A norm, and two linear layers over the patches that become one token."""
    merged = width * integer(vision, 2, "spatial_merge_size") ** 2
    return norm + projection(merged, merged) + projection(merged, integer(vision, text, "out_hidden_size"))


def whisper(audio: ConfigReader, *, has_positions: bool = True) -> Counted:
    """Whisper's encoder: two convolutions over mel bins, a table of positions, and no bias on the keys."""
    width = integer(audio, 1280, "d_model", "hidden_size")
    inner = integer(audio, 5120, "encoder_ffn_dim", "intermediate_size")
    body = layers(
        num_layers(audio, 32, "encoder_layers", "num_hidden_layers"), width, inner, biases=4 * width + inner,
        norms=4 * width,
    )  # fmt: skip
    whole = projection(3 * integer(audio, 128, "num_mel_bins"), width) + projection(3 * width, width) + 2 * width
    whole += integer(audio, 1500, "max_source_positions") * width if has_positions else 0
    return added(body, (0, whole))


# A model of timm: its parameters as Transformers builds it, without a classifier and merged for inference.
_TIMM = {"fastvit_mci3": 122_714_208, "mobilenetv5_300m_enc": 294_126_912}


def timm(vision: ConfigReader) -> int:
    """The parameters of the model of timm under `architecture`, which timm 1.0.31 builds on the meta device."""
    name = str(vision.word("architecture"))
    sizes = _TIMM.get(name)
    if sizes is None:
        raise ModelError(f"the weights of timm's {name[:80]} are not counted")
    return sizes


def q_former(config: ConfigReader, encoder: int, embeds_text: bool = False) -> int:
    """BLIP-2's Q-Former: BERT's layers, of which every cross_attention_frequency-th reads the encoder's output.

    `encoder` is the width of that output if the config does not state it. With use_qformer_text_input, the layers have
    a second MLP. With `embeds_text` (InstructBLIP), they do too, and the Q-Former embeds the question itself.
    """
    width, inner = integer(config, 768, "hidden_size"), integer(config, 3072, "intermediate_size")
    number, step = num_layers(config, 12, "num_hidden_layers"), integer(config, 2, "cross_attention_frequency")
    reads_text = embeds_text or config.boolean("use_qformer_text_input", False)
    encoder = integer(config, encoder, "encoder_hidden_size")
    attention = 4 * projection(width, width) + 2 * width
    mlp = projection(width, inner) + projection(inner, width) + 2 * width
    cross = 2 * projection(width, width) + 2 * projection(encoder, width) + 2 * width
    total = number * (attention + mlp) + -(-number // max(step, 1)) * cross + 2 * width
    total += number * mlp if reads_text else 0
    if embeds_text:
        rows = integer(config, 30522, "vocab_size") + integer(config, 512, "max_position_embeddings")
        total += rows * width
    return total
