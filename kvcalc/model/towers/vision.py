"""The parameters of vision towers and of the projectors behind them, by type.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class), and for Kimi K3
kimi_k25_vit.py of vLLM 0.33.0. The defaults are those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection
from kvcalc.model.towers.bodies import body, body_width, patches_3d, siglip, vit


def qwen2_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Here hidden_size is the width of the output. Biases everywhere, layer norms."""
    width = integer(vision, 1280, "embed_dim")
    inner = int(width * vision.number("mlp_ratio", 4))
    body = layers(num_layers(vision, 32, "depth"), width, inner, biases=5 * width + inner, norms=4 * width)
    return added(
        body,
        (0, patches_3d(vision, width, 14) + _merger(vision, width, integer(vision, 3584, "hidden_size"), 2 * width)),
    )


def qwen2_5_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A gated MLP, and norms without a bias. EXAONE 4.5 has fewer KV heads."""
    width, inner = integer(vision, 3584, "hidden_size"), integer(vision, 3420, "intermediate_size")
    heads = integer(vision, 16, "num_heads")
    kv = integer(vision, heads, "num_key_value_heads") * (width // max(heads, 1))
    body = layers(
        num_layers(vision, 32, "depth"), width, inner, matrices=3, kv=kv, biases=3 * width + 2 * kv + 2 * inner,
        norms=2 * width,
    )  # fmt: skip
    return added(body, (0, patches_3d(vision, width, 14) + _merger(vision, width, text, width)))


def qwen3_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """The layers in deepstack_visual_indexes have a merger of their own."""
    return _qwen3(vision, text, vision.number_of("deepstack_visual_indexes", 3))


def qwen3_5(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Qwen3-VL's tower without deepstack: its class ignores deepstack_visual_indexes."""
    return _qwen3(vision, text, 0)


def _qwen3(vision: ConfigReader, text: int, levels: int) -> Counted:
    width, _, body = vit(vision, 27, 1152, 4304, "depth")
    positions = integer(vision, 2304, "num_position_embeddings") * width
    mergers = _merger(vision, width, text, 2 * width)
    mergers += levels * _merger(vision, width, text, 2 * width * integer(vision, 2, "spatial_merge_size") ** 2)
    return added(body, (0, patches_3d(vision, width, 16) + width + positions + mergers))


def _merger(vision: ConfigReader, width: int, text: int, norm: int) -> int:
    """A norm, and two linear layers over the patches that become one token."""
    merged = width * integer(vision, 2, "spatial_merge_size") ** 2
    return norm + projection(merged, merged) + projection(merged, integer(vision, text, "out_hidden_size"))


def gemma3(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP, a linear layer without a bias, and a norm."""
    width = body_width(vision, "siglip_vision_model")
    return added(body(vision, "siglip_vision_model"), (0, width * text + width))


def paligemma(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP and one linear layer."""
    return added(siglip(vision), (0, projection(body_width(vision, "siglip_vision_model"), text)))


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


def mistral3(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A norm, a merger of neighbouring patches, and two linear layers."""
    width, merged = body_width(vision, "pixtral"), integer(outer, 2, "spatial_merge_size") ** 2
    inputs = width * outer.number_of("vision_feature_layer", 1)
    bias = outer.boolean("multimodal_projector_bias", False)
    whole = width + merged * width * width + projection(inputs, text, bias) + projection(text, text, bias)
    return added(body(vision, "pixtral"), (0, whole))


def idefics3(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head, and one linear layer over the patches that become a token."""
    width = integer(vision, 1152, "hidden_size")
    stated = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    body = siglip(vision.with_defaults(stated).with_values({"vision_use_head": False}))
    return added(body, (0, width * integer(outer, 2, "scale_factor") ** 2 * text))


def lfm2_vl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP 2, and two linear layers over the patches that become a token."""
    merged = body_width(vision, "siglip2_vision_model") * integer(outer, 2, "downsample_factor") ** 2
    inner = integer(outer, 2560, "projector_hidden_size")
    bias = outer.boolean("projector_bias", True)
    whole = projection(merged, inner, bias) + projection(inner, text, bias)
    whole += 2 * merged if outer.boolean("projector_use_layernorm", True) else 0
    return added(body(vision, "siglip2_vision_model"), (0, whole))


def internvl(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """InternViT. The keys of OpenGVLab's own code (qkv_bias, qk_normalization) mean the same."""
    width, inner = integer(vision, 1024, "hidden_size"), integer(vision, 4096, "intermediate_size")
    has_bias = vision.boolean("qkv_bias", vision.boolean("attention_bias", outer.word("model_type") == "qianfan_ocr"))
    has_norms = vision.boolean("qk_normalization", vision.boolean("use_qk_norm", False))
    is_rms = vision.word("norm_type") == "rms_norm"
    norms = (2 if is_rms else 4) * width + 2 * width + (2 * width if has_norms else 0)
    body = layers(
        num_layers(vision, 24, "num_hidden_layers"), width, inner,
        biases=2 * width + inner + (3 * width if has_bias else 0), norms=norms,
    )  # fmt: skip
    number, patch = patches(vision, 448, 14)
    whole = width + (number + 1) * width + projection(integer(vision, 3, "num_channels") * patch * patch, width)
    merged = width * int(1 / outer.number("downsample_ratio", 0.5)) ** 2
    return added(body, (0, whole + 2 * merged + projection(merged, text) + projection(text, text)))


def llama4(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A vision transformer with a class token, an adapter of two layers, and a linear layer."""
    width, inner, body = vit(vision, 34, 768, 5632)
    number, patch = patches(vision, 448, 14)
    whole = width + (number + 1) * width + integer(vision, 3, "num_channels") * patch * patch * width + 4 * width
    adapter = inner * integer(vision, 4096, "projector_input_dim") + integer(vision, 4096, "projector_output_dim") ** 2
    return added(body, (0, whole + adapter + text * integer(vision, 7680, "vision_output_dim")))


def mllama(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Two stacks of layers, of which the second is gated, and position tables for every shape of tiles."""
    width, inner = integer(vision, 1280, "hidden_size"), integer(vision, 5120, "intermediate_size")
    more = {"biases": width + inner, "norms": 4 * width}
    local = layers(num_layers(vision, 32, "num_hidden_layers"), width, inner, **more)
    number_global = num_layers(vision, 8, "num_global_layers")
    gated = added(layers(number_global, width, inner, **more), (0, 2 * number_global))
    number, patch = patches(vision, 448, 14)
    tiles, rows = integer(vision, 4, "max_num_tiles"), vision.number_of("supported_aspect_ratios", 8) + 1
    whole = width + integer(vision, 3, "num_channels") * patch * patch * width + (number + 1) * width + 4 * width + 3
    whole += rows * tiles * ((number + 1) * width + 2 * width)
    return added(local, gated, (0, whole + projection(integer(vision, 7680, "vision_output_dim"), text)))


def moonvit(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """MoonViT of Kimi-VL, K2.5 and K3. Published configs and Transformers' class spell the keys differently."""
    width = integer(vision, 1152, "hidden_size", "vt_hidden_size")
    inner = integer(vision, 4304, "intermediate_size", "vt_intermediate_size")
    heads = integer(vision, width, "qkv_hidden_size")
    is_rms = vision.word("norm_type") == "rmsnorm"
    norm = width if is_rms else 2 * width
    biases = (3 * heads + width) * vision.boolean("attn_bias", True)
    biases += (inner + width) * vision.boolean("linear_bias", True)
    body = layers(
        num_layers(vision, 27, "num_hidden_layers", "vt_num_hidden_layers"), width, inner, heads=heads, biases=biases,
        norms=2 * norm,
    )  # fmt: skip
    patch = integer(vision, 14, "patch_size")
    grid = integer(vision, 64, "pos_emb_height", "init_pos_emb_height")
    grid *= integer(vision, 64, "pos_emb_width", "init_pos_emb_width")
    whole = projection(3 * patch * patch, width, vision.boolean("patch_embed_proj_bias", True)) + grid * width + norm
    rows, columns = vision.pair("merge_kernel_size", (2, 2))
    merged = width * rows * columns
    if vision.word("mm_projector_type") == "patchmergerv2":
        whole += projection(merged, merged, False) + projection(merged, text, False) + text
    else:
        whole += 2 * width + projection(merged, merged) + projection(merged, text)
    return added(body, (0, whole))


def glm4v(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """The MLPs of the layers are as wide as the output; intermediate_size is that of the merger."""
    width, out = integer(vision, 1536, "hidden_size"), integer(vision, 4096, "out_hidden_size")
    number, patch = patches(vision, 336, 14)
    bias = 3 * width if vision.boolean("attention_bias", False) else 0
    body = layers(num_layers(vision, 24, "depth"), width, out, matrices=3, biases=bias, norms=2 * width)
    merged = integer(vision, 2, "spatial_merge_size") ** 2
    whole = patches_3d(vision, width, patch) + width + number * width + 2 * width
    whole += merged * width * out + out + out * out + 2 * out
    return added(body, (3 * out * integer(vision, 13696, "intermediate_size"), whole))


def gemma4(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Gemma's layers with norms on queries and keys, and a table of positions for each axis."""
    width, inner = integer(vision, 768, "hidden_size"), integer(vision, 3072, "intermediate_size")
    heads, head_dim = integer(vision, 12, "num_attention_heads"), integer(vision, 64, "head_dim")
    kv = integer(vision, heads, "num_key_value_heads") * head_dim
    bias = 2 * kv + heads * head_dim + width if vision.boolean("attention_bias", False) else 0
    body = layers(
        num_layers(vision, 16, "num_hidden_layers"), width, inner, matrices=3, heads=heads * head_dim, kv=kv,
        biases=bias, norms=4 * width + 2 * head_dim,
    )  # fmt: skip
    patch = integer(vision, 16, "patch_size")
    positions = 2 * integer(vision, 10240, "position_embedding_size") * width
    return added(body, (0, positions + 3 * patch * patch * width + width * text))


def gemma4_unified(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """No layers: a patch goes straight into the language model."""
    width = integer(vision, 3840, "mm_embed_dim")
    pixels = 3 * (integer(vision, 16, "patch_size") * integer(vision, 3, "pooling_kernel_size")) ** 2
    whole = 2 * integer(vision, 1120, "mm_posemb_size") * width + 2 * pixels + projection(pixels, width) + 4 * width
    return 0, whole + integer(vision, 3840, "output_proj_dims") * text


def minimax_m3(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """CLIP's layers over patches of two frames; the published config calls it clip_vision_model."""
    width, _, body = vit(vision, 32, 1280, 5120)
    hidden = integer(outer, text, "projector_hidden_size")
    merged = hidden * integer(vision, 2, "spatial_merge_size") ** 2
    projector = projection(width, hidden) + projection(hidden, text) + projection(merged, hidden)
    return added(body, (0, patches_3d(vision, width, 14) + 2 * width + projector + projection(hidden, text)))


# haotian-liu/LLaVA's own types, whose config is flat. They have the vector if mm_patch_merge_type says so.
_FLAT_LLAVA = ("llava_llama", "llava_mistral", "llava_qwen")
