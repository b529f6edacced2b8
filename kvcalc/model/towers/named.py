"""The parameters of vision towers that a config names without their dimensions.

`mm_vision_tower` of LLaVA's flat configs names a repository, and `architecture` a model of timm. The dimensions are
those of the repository's config.json, the counts those of timm 1.0.31, whose models are built on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, integer, projection

# A model of timm: its parameters as Transformers builds it, without a classifier and merged for inference.
_TIMM: Mapping[str, int] = {"fastvit_mci3": 122_714_208, "mobilenetv5_300m_enc": 294_126_912}

_CLIP_L = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14,
}  # fmt: skip
# A repository: the vision_config of its config.json.
REPOSITORIES: Mapping[str, Mapping[str, object]] = {
    "openai/clip-vit-large-patch14": {**_CLIP_L, "image_size": 224},
    "openai/clip-vit-large-patch14-336": {**_CLIP_L, "image_size": 336},
    "google/siglip-so400m-patch14-384": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
    },
}  # fmt: skip


def _timm(vision: ConfigReader) -> int:
    name = str(vision.word("architecture"))
    found = _TIMM.get(name)
    if found is None:
        raise ModelError(f"the weights of timm's {name[:80]} are not counted")
    return found


def gemma3n(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """MobileNet V5. Images have an embedding of their own before they are projected."""
    vision = vision.with_defaults({"architecture": "mobilenetv5_300m_enc"})
    width = integer(vision, 2048, "hidden_size")
    return 0, _timm(vision) + (integer(vision, 128, "vocab_size") + 2) * width + width * text


def fast_vlm(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """FastViT and two linear layers."""
    vision = vision.with_defaults({"architecture": "fastvit_mci3"})
    bias = outer.boolean("multimodal_projector_bias", True)
    width = integer(vision, 3072, "hidden_size")
    return 0, _timm(vision) + projection(width, text, bias) + projection(text, text, bias)
