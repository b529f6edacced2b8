"""What the rows of Gemma 3n and Gemma 4 need besides formulas, and Gemma 4's own drafter."""

from __future__ import annotations

from kvcalc.model.families.layer_functions import integers
from kvcalc.model.families.layer_row import Row
from kvcalc.model.families.layered import read
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Block, linear, other


def read_gemma4_assistant(config: ConfigReader, model_type: str) -> ModelSpec:
    """Gemma 4's own drafter: a few layers that keep nothing, because they read the cache of the model.

    It joins the model's embedding and hidden state, of backbone_hidden_size each, and gives a hidden state back. Its
    output head is the embedding of its own. Source: Gemma4MTP, gemma4_mtp.py of vLLM 0.33.0.
    """
    shared = {**config.shares({key: key for key in ("torch_dtype", "dtype")}), "hidden_size_per_layer_input": 0}
    text = config.nested("text_config").with_defaults(shared)
    text = text.with_values({"_is_drafter": True, "num_kv_shared_layers": text.num_layers("num_hidden_layers")})
    width, backbone = text.integer("hidden_size"), config.integer("backbone_hidden_size")
    more = [linear("pre_projection", 2 * backbone, width), linear("post_projection", width, backbone)]
    if config.boolean("use_ordered_embeddings", default=False):
        more.append(other("masked_embedding.centroids", config.integer("num_centroids"), width))
    spec = read(text, text.word("model_type") or "gemma4_text")
    around = spec.around and spec.around._replace(blocks=(*spec.around.blocks, Block("", (0,), tuple(more))))
    stated = {**spec.stated, "backbone_hidden_size": backbone}
    return spec._replace(model_type=model_type, around=around, stated=stated)


def keeps_of_layers(row: Row, own: int) -> list[bool]:
    """Whether every layer keeps K and V: the first `own` layers do. A drafter's layers read its model's cache."""
    kinds = row["order"]
    if (own and {*kinds[:own]} != {*kinds}) or not (own or row.reader.is_set("_is_drafter")):
        raise row.reader.error("num_kv_shared_layers leaves no layer of the same kind to share a cache with")
    return [layer < own for layer in range(len(kinds))]


def full_shape(row: Row) -> AttentionShape:
    """The shape of Gemma 4's layers that attend to all tokens: by keys, or by per_layer_config.

    Transformers saves per_layer_config, and then reads neither global_head_dim nor num_global_key_value_heads, which
    applies only with attention_k_eq_v: keys also serve as values. Source: Gemma4TextConfig, Transformers 5.23.0.
    """
    config, kinds, shape = row.reader, row["order"], row["shape"]
    stated = config.per_layer(len(kinds))
    if stated is not None:
        full = [layer for layer, kind in zip(stated, kinds) if kind == "full_attention"]
        rest = [layer for layer, kind in zip(stated, kinds) if kind != "full_attention"]
        known = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        if any(layer != full[0] for layer in full) or any(rest) or not {*full[0]} <= {*known}:
            raise config.error("per_layer_config: only the heads of the full_attention layers may differ")
        own = {"global_head_dim": row["head_dim"], **{known[key]: value for key, value in full[0].items()}}
        config = config.without("global_head_dim").with_defaults(own)
    is_shared = config.boolean("attention_k_eq_v", default=False)
    heads = (config.optional_integer("num_global_key_value_heads") if is_shared else None) or shape.num_kv_heads
    width = config.integer("global_head_dim")
    heads = config.check_groups(shape.num_heads, heads)
    return shape._replace(num_kv_heads=heads, qk_head_dim=width, v_head_dim=width, rope_dim=width)  # type: ignore[no-any-return]


def mlp_widths(row: Row, own: int) -> list[int]:
    """The MLP width of every layer: one for all layers, or one per layer (Gemma 3n).

    In Gemma 4, layers that share keys and values may have twice the width.
    """
    config, num_layers = row.reader, row["num_layers"]
    if config.is_list("intermediate_size"):
        return integers(row, "intermediate_size")
    inner = config.integer("intermediate_size")
    doubled = 2 if config.boolean("use_double_wide_mlp", default=False) else 1
    return [inner] * own + [doubled * inner] * (num_layers - own)
