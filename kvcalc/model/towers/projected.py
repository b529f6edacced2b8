"""The parameters of more vision towers and their projectors, by the type of the model.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection
from kvcalc.model.towers.bodies import body, body_width, clip, patches_3d, siglip, vit

_SIGLIP, _CLIP = "siglip_vision_model", "clip_vision_model"


def _with(vision: ConfigReader, **stated: object) -> ConfigReader:
    """The tower's config with other defaults, or with keys that its class does not have."""
    return vision.with_defaults(stated)


def _two_layers(inputs: int, inner: int, outputs: int) -> int:
    """Two linear layers with biases."""
    return projection(inputs, inner) + projection(inner, outputs)


def aya_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Neighbouring patches become one, then a norm and a gated MLP."""
    merged = body_width(vision, _SIGLIP) * integer(outer, 2, "downsample_factor") ** 2
    inner = integer(outer, text, "alignment_intermediate_size")
    whole = 2 * merged + projection(merged, inner) + projection(inner // 2, text)
    return added(body(vision, _SIGLIP), (0, whole))


def cohere2_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Aya Vision's projector without the norm."""
    merged = body_width(vision, _SIGLIP) * integer(outer, 2, "downsample_factor") ** 2
    inner = integer(outer, 36864, "alignment_intermediate_size")
    return added(body(vision, _SIGLIP), (0, projection(merged, inner) + projection(inner // 2, text)))


def deepseek_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP and two linear layers."""
    return added(body(vision, _SIGLIP), (0, _two_layers(body_width(vision, _SIGLIP), text, text)))


def vipllava(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """The outputs of several layers, side by side."""
    inputs = body_width(vision, _CLIP) * outer.number_of("vision_feature_layers", 5)
    return added(body(vision, _CLIP), (0, 2 * inputs + _two_layers(inputs, text, text)))


def video_llava(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A tower for images, and one for videos."""
    bias = outer.boolean("multimodal_projector_bias", True)
    whole = projection(body_width(vision, _CLIP), text, bias) + projection(text, text, bias)
    tower = body(vision, _CLIP)
    return added(tower, tower, (0, whole))


def video_llama_3(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP with computed positions, and without a head."""
    width = integer(vision, 768, "hidden_size")
    tower = siglip(_with(vision, vision_use_head=False, num_patches=0))
    return added(tower, (0, _two_layers(width, text, text)))


def paddleocr_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head, a norm, and a merger of neighbouring patches."""
    vision = _with(
        vision, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, image_size=384, patch_size=14,
        vision_use_head=False,
    )  # fmt: skip
    width = integer(vision, 1152, "hidden_size")
    merged = width * integer(vision, 2, "spatial_merge_size") ** 2
    return added(siglip(vision), (0, 2 * width + _two_layers(merged, merged, text)))


def glm_ocr(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """GLM-4V's tower, where attention_bias also sets the biases of the MLPs, and with norms on queries and keys.

    GLM-5's merger states its width.
    """
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 4096, "intermediate_size")
    out, channels = integer(vision, 1536, "out_hidden_size"), integer(vision, 3, "in_channels")
    head = width // max(integer(vision, 16, "num_heads"), 1)
    biases = 2 * inner + 5 * width if vision.boolean("attention_bias", True) else 0
    tower = layers(
        num_layers(vision, 24, "depth"), width, inner, matrices=3, biases=biases, norms=2 * width + 2 * head
    )  # fmt: skip
    merged = integer(vision, 2, "spatial_merge_size") ** 2
    whole = patches_3d(vision, width, 14) + 2 * width + merged * width * out + out + out * out + 2 * out
    inner = 10240 if outer.word("model_type") == "glm5_next" else out * channels
    return added(tower, (3 * out * integer(vision, inner, "projection_intermediate_size"), whole))


def ovis2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Every patch becomes a mixture of visual words, whose embeddings are as wide as `hidden_size` of the model."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 2816, "intermediate_size")
    biases = (4 * width if vision.boolean("qkv_bias", False) else 0) + (
        2 * inner + width if vision.boolean("mlp_bias", False) else 0
    )
    tower = layers(
        num_layers(vision, 24, "num_hidden_layers"), width, inner, matrices=3, biases=biases, norms=2 * width
    )  # fmt: skip
    number, patch = patches(vision, 224, 14)
    words = integer(vision, 16384, "vocab_size")
    out = words - integer(vision, 5, "num_visual_indicator_tokens")
    whole = projection(integer(vision, 3, "num_channels") * patch * patch, width) + number * width + 2 * width
    whole += width * integer(vision, 1, "hidden_stride") ** 2 * out + 2 * out
    return added(tower, (0, whole + words * integer(outer, 1536, "hidden_size")))


def phi4(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP with a head, vectors that end a row and the whole image, and two linear layers."""
    vision = _with(
        vision, hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
        image_size=448, patch_size=14,
    )  # fmt: skip
    width = integer(vision, 1152, "hidden_size")
    return added(siglip(vision), (0, 2 * width + _two_layers(width, text, text)))


def git(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """CLIP, a linear layer and a norm; models for videos have a vector for every frame."""
    vision = _with(vision, patch_size=16)
    width = integer(vision, 768, "hidden_size")
    frames = integer(outer, 0, "num_image_with_embedding")
    return added(clip(vision), (0, projection(width, text) + 2 * text + frames * width))


def blip(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A vision transformer with a class token; the text model reads its output by cross-attention."""
    width, _, tower = vit(vision)
    number, patch = patches(vision, 384, 16)
    return added(tower, (0, projection(3 * patch * patch, width) + (number + 2) * width + 2 * width))


def pix2struct(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Gated layers without biases, and a table of positions for each axis."""
    width, inner = integer(vision, 768, "hidden_size"), integer(vision, 2048, "d_ff")
    heads = integer(vision, 12, "num_attention_heads") * integer(vision, 64, "d_kv")
    number = num_layers(vision, 12, "num_hidden_layers")
    tower = layers(number, width, inner, matrices=3, heads=heads, norms=2 * width)
    whole = projection(integer(vision, 768, "patch_embed_hidden_size"), width)
    return added(tower, (0, whole + 2 * integer(vision, 4096, "seq_len") * width + width))
