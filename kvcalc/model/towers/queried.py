"""The parameters of towers behind which learned queries read the tower's output: resamplers and Q-Formers.

Source: the modeling files of Transformers 5.23.0 (`tests/oracle/test_towers.py` builds each class). The defaults are
those of the configuration classes.
"""

from __future__ import annotations

from kvcalc.model.reader import ConfigReader
from kvcalc.model.towers.blocks import Counted, added, integer, num_layers, patches, projection
from kvcalc.model.towers.bodies import body, body_width, siglip, vit


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


def granite_speech(audio: ConfigReader, text: int, outer: ConfigReader) -> Counted:
    """A conformer with relative positions and a head in its middle, and a Q-Former over windows of frames."""
    width, times = integer(audio, 1024, "hidden_dim"), integer(audio, 4, "feedforward_mult")
    head = integer(audio, 128, "dim_head")
    heads, inner = integer(audio, 8, "num_heads") * head, width * integer(audio, 2, "conv_expansion_factor")
    split = 4 * width * width * times + 4 * width * heads + 3 * width * inner
    small = 2 * (width * times + 3 * width) + 3 * width + 2 * width + 2 * inner + 2 * inner + width + 2 * width
    small += integer(audio, 15, "conv_kernel_size") * inner
    small += (2 * integer(audio, 512, "max_pos_emb") + 1) * head
    number, out = num_layers(audio, 10, "num_layers"), integer(audio, 42, "output_dim")
    whole = projection(integer(audio, 160, "input_dim"), width) + projection(width, out) + projection(out, width)
    former = outer.nested("projector_config")
    own = integer(former, 768, "hidden_size")
    queries = integer(outer, 15, "window_size") // max(integer(outer, 5, "downsample_rate"), 1)
    whole += queries * own + q_former(former, 1408) + projection(own, text)
    return number * split, number * small + whole
