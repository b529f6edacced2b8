"""The parameters of vision towers that begin with SAM's: GOT-OCR 2, DeepSeek-VL's hybrid, DeepSeek-OCR and its kin.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection
from kvcalc.model.towers.bodies import body_width, clip, siglip
from kvcalc.model.towers.image_rule import is_second_ocr

_WIDEST = 10**6
_QWEN2 = {
    "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2,
}  # fmt: skip


def _channels(config: ConfigReader, key: str, default: list[int]) -> list[int]:
    """The channels of the convolutions under `key`: two integers, or the default."""
    stated = config.integers(key, least=1, most=_WIDEST) or default
    if len(stated) != len(default):
        raise ModelError(f"{config.name}: {key} must be a list of {len(default)}")
    return stated


def _sam(vision: ConfigReader) -> Counted:
    """SAM's encoder with its neck. Layers outside global_attn_indexes attend within windows.

    Each layer has tables of relative positions for both axes.
    """
    width, number = integer(vision, 768, "hidden_size"), num_layers(vision, 12, "num_hidden_layers")
    inner = integer(vision, int(width * vision.number("mlp_ratio", 4)), "mlp_dim")
    head = width // max(integer(vision, 12, "num_attention_heads"), 1)
    count, patch = patches(vision, 1024, 16)
    indexes = vision.integers("global_attn_indexes") or (2, 5, 8, 11)
    on_all = sum(1 for index in indexes if index < number)
    rows = on_all * (2 * round(count**0.5) - 1) + (number - on_all) * (2 * integer(vision, 14, "window_size") - 1)
    tables = 2 * rows * head if vision.boolean("use_rel_pos", True) else 0
    biases = 2 * width + inner + (3 * width if vision.boolean("qkv_bias", True) else 0)
    whole = projection(integer(vision, 3, "num_channels") * patch * patch, width) + _neck(vision, width)
    whole += count * width if vision.boolean("use_abs_pos", True) else 0
    return added(layers(number, width, inner, biases=biases, norms=4 * width), (0, whole + tables))


def _neck(vision: ConfigReader, width: int) -> int:
    """Two convolutions without biases, each with a norm."""
    out = integer(vision, 256, "output_channels")
    return width * out + 9 * out * out + 4 * out


def _halved(vision: ConfigReader, first: int, second: int) -> int:
    """Two convolutions that halve both sides, without biases."""
    return 9 * integer(vision, 256, "output_channels") * first + 9 * first * second


def got_ocr2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Two convolutions up to the width of the language model, and one linear layer."""
    out = integer(vision, 256, "output_channels")
    return added(_sam(vision), (0, _halved(vision, 2 * out, text) + projection(text, text)))


def deepseek_vl_hybrid(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP for the whole image, and SAM with a second neck for the details.

    An aligner takes both, each at half the width of the language model.
    """
    high = outer.nested("high_res_vision_config")
    out, width = integer(high, 256, "output_channels"), integer(high, 768, "hidden_size")
    whole = 1 + _neck(high, width) + _halved(high, 2 * out, 4 * out) + projection(text, text)
    whole += projection(body_width(vision, "siglip_vision_model"), text // 2) + projection(4 * out, text // 2)
    return added(siglip(vision), _sam(high), (0, whole))


def unlimited_ocr(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SAM, then CLIP's layers over SAM's output, whose patches CLIP does not embed again."""
    sam, encoder = vision.nested("sam_config"), _clip_over_sam(vision.nested("encoder_config"))
    first, second = _channels(sam, "downsample_channels", [512, 1024])
    width, patch = integer(encoder, 1024, "hidden_size"), integer(encoder, 14, "patch_size")
    split, whole = clip(encoder)
    whole += _halved(sam, first, second) - 3 * patch * patch * width - 2 * width
    return added(_sam(sam), (split, whole + projection(width + second, text) + 2 * text))


def _clip_over_sam(encoder: ConfigReader) -> ConfigReader:
    stated = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 224}
    return encoder.with_defaults({**stated, "patch_size": 14})


def deepseek_ocr(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """DeepSeek-OCR's own code: SAM-B and CLIP-L, whose patch embedding is in the checkpoint but is not used.

    DeepSeek-VL2 has the same type, and so has DeepSeek-OCR 2 with its own code, whose tower is that of Transformers'
    class with the layers of Qwen2-0.5B.

    Source: deepseek_ocr.py and deepencoder.py, model_executor/models, vLLM 0.33.0; the config of
    Qwen/Qwen2-0.5B. With them, DeepSeek-OCR 2 has the parameters of its checkpoint.
    """
    if is_second_ocr(outer):
        return deepseek_ocr2(ConfigReader({"encoder_config": _QWEN2}, vision.name, vision.source), text, outer)
    if vision.word("model_name") != "deeplip_b_l":
        from kvcalc.model.towers.remote import deepseek_vl2

        return deepseek_vl2(vision, text, outer)
    none = ConfigReader({}, vision.name, vision.source)
    return added(unlimited_ocr(none, text, outer), (0, 3 * 14 * 14 * 1024))


def deepseek_ocr2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SAM, then the layers of Qwen2 with learned queries: 144 for a tile, and 256 for the whole image."""
    sam, encoder = vision.nested("sam_config"), vision.nested("encoder_config")
    width, heads = integer(encoder, 4096, "hidden_size"), integer(encoder, 32, "num_attention_heads")
    kv = integer(encoder, heads, "num_key_value_heads") * (width // max(heads, 1))
    body = layers(
        num_layers(encoder, 32, "num_hidden_layers"), width, integer(encoder, 22016, "intermediate_size"), matrices=3,
        kv=kv, biases=width + 2 * kv, norms=2 * width,
    )  # fmt: skip
    whole = _halved(sam, *_channels(sam, "downsample_channels", [512, 896])) + (144 + 256 + 1) * width
    return added(_sam(sam), body, (0, whole + projection(width, text) + text))
