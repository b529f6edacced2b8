"""The parameters of vision towers whose rules need more than a row of tower_weights.yaml.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, number_of, projection, side
from kvcalc.model.towers.bodies import body, body_width, q_former, siglip

# haotian-liu/LLaVA's own types, whose config is flat. They have the vector if mm_patch_merge_type says so.
_FLAT_LLAVA = ("llava_llama", "llava_mistral", "llava_qwen")


def llava(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Two linear layers behind the tower. The models for several tiles also have a vector that ends a row of tiles."""
    inputs = body_width(vision, "clip_vision_model") * outer.number_of("vision_feature_layer", 1)
    bias = outer.boolean("multimodal_projector_bias", True)
    whole = projection(inputs, text, bias) + projection(text, text, bias)
    kind, merged = outer.word("model_type"), outer.word("mm_patch_merge_type")
    if not outer.is_any("mm_projector_type", None, "mlp2x_gelu"):
        raise outer.error("mm_projector_type: only mlp2x_gelu is counted")
    ends_rows = "unpad" in str(merged) if kind in _FLAT_LLAVA else kind not in ("llama", "llava")
    whole += text if ends_rows else 0
    return added(body(vision, "clip_vision_model"), (0, whole))


def lfm3_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """LFM's layers: short convolutions over the grid of patches, and attention in some layers."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 2560, "intermediate_size")
    number, heads = num_layers(vision, 14, "num_hidden_layers"), integer(vision, 16, "num_attention_heads")
    kinds = vision.strings("layer_types", number, ("conv", "full_attention"))
    kinds = kinds or ["conv" if n < 2 or n % 2 else "full_attention" for n in range(number)]
    with_attention, head = kinds.count("full_attention"), width // max(heads, 1)
    kv = integer(vision, 8, "num_key_value_heads") * head
    tower = layers(with_attention, width, inner, matrices=3, heads=heads * head, kv=kv, norms=2 * width + 2 * head)
    kernel = integer(vision, 3, "conv_kernel_size") ** 2
    convolved = (number - with_attention) * (4 * width * width + 3 * width * inner)
    small = (number - with_attention) * (kernel + 2) * width
    patch, frames = side(vision, "patch_size", 16), side(vision, "temporal_patch_size", 2)
    whole = integer(vision, 3, "in_channels") * frames * patch * patch * width + width + 2 * width
    merged, middle = (
        width * integer(vision, 2, "spatial_merge_size") ** 2,
        integer(outer, 4096, "projector_hidden_size"),
    )
    bias = outer.boolean("projector_bias", True)
    whole += projection(merged, middle, bias) + projection(middle, text, bias)
    return added(tower, (convolved, small + whole))


def radio(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """RADIO's scaled layers, positions for the largest image, and class and register tokens; no last norm."""
    width = integer(vision, 1280, "hidden_size")
    inner = int(width * vision.number("mlp_ratio", 4))
    biases = 2 * width + inner + (3 * width if vision.boolean("qkv_bias", True) else 0)
    tower = layers(num_layers(vision, 32, "num_hidden_layers"), width, inner, biases=biases, norms=6 * width)
    if vision.boolean("use_swiglu_ffn", False):
        raise ModelError(f"{vision.name}: use_swiglu_ffn is not counted")
    patch, frames = side(vision, "patch_size", 16), vision.optional_integer("video_temporal_patch_size")
    pixels = integer(vision, 3 * patch * patch, "patch_dim")
    video = integer(vision, pixels * (frames or 0), "video_patch_dim")
    tokens = number_of(vision, 3, "num_cls_tokens") + number_of(vision, 7, "num_registers")
    whole = (pixels + video + (integer(vision, 2048, "max_img_size") // patch) ** 2 + tokens) * width
    tower_width = integer(outer, 1280, "vision_hidden_size", "vit_hidden_size")
    merged = tower_width * int(1 / outer.number("downsample_ratio", 0.5)) ** 2
    middle = integer(outer, 4096, "projector_hidden_size")
    # Checkpoints with MTP layers have a last norm.
    whole += 2 * tower_width if integer(outer.nested("text_config"), 0, "num_nextn_predict_layers") else 0
    return added(tower, (0, whole + merged + merged * middle + middle * text))


def florence2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """DaViT: four stages, whose blocks attend within windows and then among channels; tables of positions."""
    widths = vision.integers("embed_dim", least=1, most=10**6) or [128, 256, 512, 1024]
    depths = vision.integers("depths", most=1000) or [1, 1, 9, 1]
    kernels = vision.integers("patch_size", least=1, most=1000) or [7, 3, 3, 3]
    before = vision.listed("patch_prenorm") or [False, True, True, True]
    if len({len(widths), len(depths), len(kernels), len(before)}) != 1:
        raise ModelError(f"{vision.name}: embed_dim, depths, patch_size and patch_prenorm differ in length")
    split, whole, inputs = 0, 0, integer(vision, 3, "in_channels")
    for width, depth, kernel, normed in zip(widths, depths, kernels, before):
        inner = int(width * vision.number("mlp_ratio", 4))
        bias = 3 * width if vision.boolean("qkv_bias", True) else 0
        matrices, small = layers(2 * depth, width, inner, biases=2 * width + inner + bias, norms=4 * width)
        split += matrices
        whole += small + 2 * depth * 2 * 10 * width
        whole += projection(kernel * kernel * inputs, width) + 2 * (inputs if normed else width)
        inputs = width
    out, rows = integer(vision, text, "projection_dim"), integer(vision, 50, "max_position_embeddings")
    return split, whole + inputs * out + 2 * out + rows * inputs


def dots3_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Norms on queries and keys, and experts in the last layers, whose number may differ."""
    width, inner = integer(vision, 1536, "hidden_size"), integer(vision, 4224, "intermediate_size")
    number, expert_width = num_layers(vision, 42, "num_hidden_layers"), integer(vision, 2112, "moe_intermediate_size")
    kinds = vision.strings("mlp_layer_types", number, ("dense", "sparse"))
    if kinds is None or vision.boolean("attention_bias", False) or vision.boolean("mlp_bias", False):
        raise ModelError(f"{vision.name}: towers with biases or without mlp_layer_types are not counted")
    head = width // max(integer(vision, 24, "num_attention_heads"), 1)
    split, whole = layers(number, width, 0, norms=2 * width + 2 * head)
    stated = vision.per_layer(number) or [{}] * number
    for kind, more in zip(kinds, stated):
        experts = integer(vision.with_values(more), 64, "num_local_experts")
        split += experts * 3 * width * expert_width if kind == "sparse" else 3 * width * inner
        whole += experts * width if kind == "sparse" else 0
    patch, taken = integer(vision, 14, "patch_size"), integer(vision, 1536, "adapter_in_dim")
    merged = taken * integer(vision, 2, "adapter_merge_size") ** 2
    whole += projection(integer(vision, 3, "num_channels") * patch * patch, width) + 2 * width + 2 * taken
    whole += projection(merged, merged) + projection(merged, integer(vision, 5120, "adapter_out_dim"))
    return split, whole


def aria(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head. The number of queries is that of the largest image."""
    stated = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    tower = siglip(vision.with_defaults(stated).with_values({"vision_use_head": False}))
    width = integer(vision, 1152, "hidden_size")
    queries = outer.nested("projector_patch_to_query_dict").all_integers()
    number = max(queries) if queries else integer(outer, 256, "max_value_projector_patch_to_query_dict")
    attention = 3 * width * width + projection(width, 3 * width) + 2 * projection(width, width)
    return added(tower, (0, attention + number * width + 6 * width + width * text + text * text))


def granite4_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """One Q-Former over windows for each layer of the tower that is read, and four for the offsets within a window."""
    former = outer.nested("qformer_config")
    width = body_width(vision, "clip_vision_model")
    widths = {"hidden_size": width, "encoder_hidden_size": width}  # whatever the config states
    former = former.with_defaults({"num_hidden_layers": 1, "cross_attention_frequency": 1}).with_values(widths)
    number = 4 + outer.number_of("deepstack_layer_map", 0)
    query, window = outer.fraction("downsample_rate", most=1000)
    each = (query**2 + window**2 + 2) * width + q_former(former, width) + projection(width, text)
    return added(body(vision, "clip_vision_model"), (0, number * each + text))
