"""The parameters of vision towers whose models are published with their own code, as vLLM loads them.

Source: the classes of vLLM 0.33.0 (model_executor/models), whose counts `tests/model/tower_parameters.jsonl` has. vLLM
leaves out the layers behind the one that is read, and a last norm that is not used.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection, side
from kvcalc.model.towers.bodies import siglip

_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14}


def _with(vision: ConfigReader, **stated: object) -> ConfigReader:
    """The tower's config with other defaults."""
    return vision.with_defaults(stated)


def minicpm(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head, and queries that attend to its output once (minicpmv.py, layers/resampler.py)."""
    if outer.version("version") in ("2", "2.0") or not outer.mentions("version"):
        raise ModelError("the weights of MiniCPM-V's tower before 2.5 are not counted")
    vision = _with(vision, **_SO400M, image_size=980, vision_use_head=False)
    width = integer(vision, 1152, "hidden_size")
    tower = siglip(vision)
    if outer.boolean("drop_vision_last_layer", False):
        inner = integer(vision, 4304, "intermediate_size")
        last, small = layers(1, width, inner, biases=5 * width + inner, norms=4 * width)
        tower = tower[0] - last, tower[1] - small
    whole = integer(outer, 64, "query_num") * text + (width * text if width != text else 0)
    return added(tower, (0, whole + 4 * projection(text, text) + 6 * text + text * text))


def ovis(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """AIMv2 or SigLIP without a head; every 2 x 2 patches become a mixture of visual words (ovis.py, aimv2.py)."""
    backbone = vision.nested("backbone_config")
    kind = backbone.word("model_type")
    if kind == "siglip_vision_model":
        backbone = _with(backbone, **_SO400M, image_size=384)
        width, tower = integer(backbone, 1152, "hidden_size"), siglip(_with(backbone, vision_use_head=False))
    elif kind in ("aimv2", "aimv2_vision_model"):
        width, inner = integer(backbone, 1024, "hidden_size"), integer(backbone, 2816, "intermediate_size")
        bias = (3 * width if backbone.boolean("qkv_bias", False) else 0) + (
            width if backbone.boolean("use_bias", False) else 0
        )
        if bias or backbone.boolean("mlp_bias", False):
            raise ModelError(f"{vision.name}: AIMv2 with biases is not counted")
        tower = layers(num_layers(backbone, 24, "num_hidden_layers"), width, inner, matrices=3, norms=2 * width)
        number, patch = patches(backbone, 448, 14)
        embeds = projection(integer(backbone, 3, "num_channels") * patch * patch, width) + number * width + width
        tower = added(tower, (0, embeds))
    else:
        raise ModelError(f"the weights of a vision tower of type {str(kind)[:80]} are not counted")
    words = integer(vision, 65536, "vocab_size")
    return added(tower, (0, _words(words, 5, width * integer(vision, 2, "hidden_stride") ** 2, text)))


def _words(words: int, indicators: int, merged: int, text: int) -> int:
    """A linear layer without a bias, a norm, and the embeddings of all words and indicators."""
    return merged * (words - indicators) + 2 * (words - indicators) + words * text


def ovis2_5(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP 2 with a table of positions; every 2 x 2 patches become a mixture (ovis2_5.py, siglip2navit.py)."""
    vision = _with(vision, **{**_SO400M, "patch_size": 16}, image_size=512, vision_use_head=False)
    number = patches(vision, 512, 16)[0]
    if not vision.is_any("num_patches", -1):
        number = integer(vision, number, "num_patches")
    number = number if vision.boolean("preserve_original_pe", True) else 0
    vision = vision.with_values({"num_patches": number})
    merged = integer(vision, 1152, "hidden_size") * integer(vision, 2, "hidden_stride") ** 2
    return added(siglip(vision), (0, _words(integer(outer, 65536, "visual_vocab_size"), 4, merged, text)))


# VIT_TIMM_DIM_BY_NAME, transformers_utils/configs/radio.py: width, layers and the MLP's width.
_RADIO = {
    "vit_small_patch16_224": (384, 12, 1536), "vit_base_patch16_224": (768, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 4096), "vit_huge_patch16_224": (1280, 32, 5120),
    "vit_so400m_patch16_224": (1152, 27, 4304),
}  # fmt: skip


def nemotron(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """RADIO by its name, and a norm and two linear layers (radio.py, nano_nemotron_vl.py).

    They have biases beside Llama (nemotron_vl.py).
    """
    stated = vision.nested("args")
    name = str(stated.word("model"))
    if name not in _RADIO or stated.boolean("qk_normalization", False):
        raise ModelError(f"the weights of the RADIO tower {name[:80]} are not counted")
    width, number, inner = _RADIO[name]
    biases = 2 * width + inner + (3 * width if stated.boolean("qkv_bias", True) else 0)
    tower = layers(number, width, inner, biases=biases, norms=6 * width)
    named = {teacher.word("name") for teacher in stated.objects("teachers")}
    tokens = len(named) if stated.boolean("cls_token_per_teacher", False) else 1
    multiple = stated.optional_integer("register_multiple")
    tokens += multiple - tokens % multiple if multiple else 0
    patch, frames = integer(vision, 16, "patch_size"), integer(vision, 1, "video_temporal_patch_size")
    pixels = 3 * patch * patch * (1 + frames if frames > 1 else 1)
    whole = (pixels + round(integer(stated, 2048, "cpe_max_size") / patch) ** 2 + tokens) * width
    width_of_tower, middle = integer(outer, width, "vit_hidden_size"), outer.integer("projector_hidden_size")
    merged = width_of_tower * round(1 / outer.number("downsample_ratio", 0.5)) ** 2
    # Checkpoints with MTP layers have a last norm.
    whole += 2 * width_of_tower if integer(outer.nested("llm_config"), 0, "num_nextn_predict_layers") else 0
    biases = merged + middle + text if outer.word("model_type") == "Llama_Nemotron_Nano_VL" else 0
    return added(tower, (0, whole + merged + merged * middle + middle * text + biases))


def deepseek_vl2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """timm's SigLIP with its pooling head, two linear layers over 2 x 2 patches, and two vectors (deepseek_vl2.py)."""
    if (integer(vision, 1152, "width"), num_layers(vision, 27, "layers"), side(vision, "image_size", 384)) != (
        1152,
        27,
        384,
    ):
        raise ModelError(f"{vision.name}: only SigLIP SO400M of 384 pixels is counted")
    projector = outer.nested("projector_config")
    if not projector.is_any("projector_type", None, "downsample_mlp_gelu"):
        raise ModelError("projector_type: only downsample_mlp_gelu is counted")
    out, depth = integer(projector, text, "n_embed"), num_layers(projector, 2, "depth")
    inner = out * integer(projector, 1, "mlp_ratio")
    by = integer(projector, 2, "downsample_ratio") ** 2
    whole = projection(integer(projector, 1152, "input_dim") * by, inner) + (depth - 2) * projection(inner, inner)
    tower = siglip(ConfigReader({**_SO400M, "image_size": 384}, vision.name, vision.source))
    return added(tower, (0, whole + projection(inner, out) + 2 * out))
