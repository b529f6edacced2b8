"""The parameters of towers behind which learned queries read the tower's output: resamplers and Q-Formers.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, layers, num_layers, patches, projection
from kvcalc.model.towers.bodies import body, body_width, clip, siglip, vit


def q_former(config: ConfigReader, encoder: int, *, embeds_text: bool = False) -> int:
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


def idefics2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head, a gated MLP as wide as the language model's, and a resampler."""
    tower = siglip(vision.with_defaults({"patch_size": 32}).with_values({"vision_use_head": False}))
    inner = integer(outer.nested("text_config"), 14336, "intermediate_size")
    resampler = outer.nested("perceiver_config")
    head_dim, number = integer(resampler, 96, "resampler_head_dim"), num_layers(resampler, 3, "resampler_depth")
    heads = integer(resampler, 16, "resampler_n_heads") * head_dim
    kv = integer(resampler, 4, "num_key_value_heads") * head_dim
    sampler = layers(number, text, 4 * text, matrices=3, heads=heads, kv=kv, norms=3 * text)
    whole = (2 * body_width(vision, "siglip_vision_model") + text) * inner
    return added(tower, sampler, (0, whole + integer(resampler, 64, "resampler_n_latents") * text + text))


def aria(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """SigLIP without a head. The number of queries is that of the largest image."""
    stated = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    tower = siglip(vision.with_defaults(stated).with_values({"vision_use_head": False}))
    width = integer(vision, 1152, "hidden_size")
    queries = outer.nested("projector_patch_to_query_dict").all_integers()
    number = max(queries) if queries else integer(outer, 256, "max_value_projector_patch_to_query_dict")
    attention = 3 * width * width + projection(width, 3 * width) + 2 * projection(width, width)
    return added(tower, (0, attention + number * width + 6 * width + width * text + text * text))


def blip_2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A class token and learned positions; InstructBLIP's Q-Former also reads the question."""
    stated = {"hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39}
    vision = vision.with_defaults(stated)
    width, _, tower = vit(vision)
    number, patch = patches(vision, 224, 14)
    former = outer.nested("qformer_config")
    own = integer(former, 768, "hidden_size")
    embeds_text = str(outer.word("model_type")).startswith("instructblip")
    whole = projection(3 * patch * patch, width) + (number + 2) * width + 2 * width
    whole -= 0 if vision.boolean("qkv_bias", True) else 3 * width * num_layers(vision, 39, "num_hidden_layers")
    whole += q_former(former, width, embeds_text=embeds_text) + integer(outer, 32, "num_query_tokens") * own
    return added(tower, (0, whole + projection(own, text)))


def granite4_vision(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """One Q-Former over windows for each layer of the tower that is read, and four for the offsets within a window."""
    former = outer.nested("qformer_config")
    width = body_width(vision, "clip_vision_model")
    own = {"hidden_size": width, "encoder_hidden_size": width}  # whatever the config states
    former = former.with_defaults({"num_hidden_layers": 1, "cross_attention_frequency": 1}).with_values(own)
    number = 4 + outer.number_of("deepstack_layer_map", 0)
    query, window = outer.fraction("downsample_rate", most=1000)
    each = (query**2 + window**2 + 2) * width + q_former(former, width) + projection(width, text)
    return added(body(vision, "clip_vision_model"), (0, number * each + text))


def molmo2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A transformer without a last norm. Pooled patches of several layers are the queries of one attention."""
    width, inner = integer(vision, 1152, "hidden_size"), integer(vision, 4304, "intermediate_size")
    tower = _attention_layers(vision, width, width, inner, num_layers(vision, 25, "num_hidden_layers"))
    adapter = outer.nested("adapter_config")
    read = adapter.number_of("vision_feature_layer", 2) * width
    own = integer(adapter, 1152, "hidden_size")
    heads, kv, bias = _heads(adapter)
    pooling = (heads + 2 * kv) * read + heads * own + (heads + 2 * kv + own if bias else 0)
    wide, out = integer(adapter, 18944, "intermediate_size"), integer(adapter, 3584, "text_hidden_size")
    whole = pooling + (2 * own + out) * wide + (2 * wide if adapter.boolean("mlp_bias", False) else 0)
    patch = integer(vision, 14, "patch_size")
    whole += integer(vision, 729, "num_position_embeddings") * width
    whole += projection(integer(vision, 3, "num_channels") * patch * patch, width)
    return added(tower, (0, whole))


def _heads(config: ConfigReader) -> tuple[int, int, bool]:
    """The widths of all queries and of all keys, and whether the projections have biases."""
    head_dim, heads = integer(config, 72, "head_dim"), integer(config, 16, "num_attention_heads")
    kv = integer(config, 16, "num_key_value_heads")
    return heads * head_dim, kv * head_dim, config.boolean("attention_bias", True)


def _attention_layers(vision: ConfigReader, width: int, out: int, inner: int, number: int) -> Counted:
    heads, kv, bias = _heads(vision)
    biases = inner + width + (heads + 2 * kv + out if bias else 0)
    return layers(number, width, inner, heads=heads, kv=kv, biases=biases, norms=4 * width)


def kosmos_2(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """CLIP, and queries that attend to its output once."""
    stated = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "patch_size": 14}
    tower = clip(vision.with_defaults(stated))
    width = integer(vision, 1024, "hidden_size")
    return added(tower, (0, _queries(width, integer(outer, 64, "latent_query_num"), text)))


def kosmos_2_5(vision: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """Pix2Struct's layers, with a table of positions for each axis."""
    width, inner = integer(vision, 1536, "hidden_size"), integer(vision, 3968, "intermediate_size")
    heads = integer(vision, 24, "num_attention_heads") * integer(vision, 64, "head_dim")
    number, rows = num_layers(vision, 18, "num_hidden_layers"), integer(vision, 4096, "max_num_patches")
    tower = layers(number, width, inner, matrices=3, heads=heads, norms=2 * width)
    whole = projection(integer(vision, 768, "patch_embed_hidden_size"), width) + 2 * rows * width + width
    return added(tower, (0, whole + _queries(width, integer(outer, 2048, "latent_query_num"), text)))


def _queries(width: int, number: int, text: int) -> int:
    return projection(width, text) + 4 * projection(text, text) + number * text
