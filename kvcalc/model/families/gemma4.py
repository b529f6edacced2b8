"""Gemma 4's own drafter."""

from __future__ import annotations

from kvcalc.model.families.layered import read
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Block, linear, other


def read_gemma4_assistant(config: ConfigReader, model_type: str) -> ModelSpec:
    """Gemma 4's own drafter: a few layers that keep nothing, because they read the cache of the model.

    It joins the model's embedding and hidden state, of backbone_hidden_size each, and gives a hidden state back. Its
    output head is the embedding of its own. Source: Gemma4MTP, gemma4_mtp.py of vLLM 0.33.0.
    """
    own = {**config.shares({key: key for key in ("torch_dtype", "dtype")}), "hidden_size_per_layer_input": 0}
    text = config.nested("text_config").with_defaults(own)
    text = text.with_values({"_is_drafter": True, "num_kv_shared_layers": text.num_layers("num_hidden_layers")})
    width, backbone = text.integer("hidden_size"), config.integer("backbone_hidden_size")
    more = [linear("pre_projection", 2 * backbone, width), linear("post_projection", width, backbone)]
    if config.boolean("use_ordered_embeddings", default=False):
        more.append(other("masked_embedding.centroids", config.integer("num_centroids"), width))
    spec = read(text, text.word("model_type") or "gemma4_text")
    around = spec.around and spec.around._replace(blocks=(*spec.around.blocks, Block("", (0,), tuple(more))))
    stated = {**spec.stated, "backbone_hidden_size": backbone}
    return spec._replace(model_type=model_type, around=around, stated=stated)
