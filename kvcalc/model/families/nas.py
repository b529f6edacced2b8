"""What the rows of Nemotron-NAS and DeciLM need besides formulas: a search chose every layer."""

from __future__ import annotations

from kvcalc.model.families.common import grouped_shape
from kvcalc.model.families.layer_functions import round_up
from kvcalc.model.families.layer_row import Row
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.tensors import Weight, gated_mlp, linear, norm


def kv_heads_of_layers(row: Row) -> list[int]:
    """The number of KV heads of every layer, 0 if it keeps nothing."""
    config, num_layers = row.reader, row["num_layers"]
    key = "block_configs" if config.has("block_configs") else "num_key_value_heads_per_layer"
    if config.number_of(key, 0) != num_layers:
        raise config.error(f"{key} must be a list of {num_layers}, one per layer")
    heads = row["num_attention_heads"]
    if key == "block_configs":
        kv_heads = [_block_kv_heads(config, block, heads) for block in config.objects(key)]
    else:
        kv_heads = config.integers(key, least=1)
    return [number and config.check_groups(heads, number) for number in kv_heads]


def _block_kv_heads(config: ConfigReader, block: ConfigReader, num_heads: int) -> int:
    attention = block.nested("attention")
    if not block.has("attention"):
        raise config.error("block_configs: a layer has no attention object")
    if attention.boolean("no_op", default=False) or attention.boolean("replace_with_linear", default=False):
        return 0
    # What would make a layer keep something other than all of its K and V.
    others = "sparsify window_length num_sink_tokens unshifted_sink use_prefill_window_in_sink_attention"
    for key in others.split():
        attention.refuse(key, "block_configs: the cache of this layer is not supported")
    return num_heads // config.check_groups(num_heads, attention.integer("n_heads_in_group"))


def shape_with(row: Row, kv_heads: list[int]) -> AttentionShape:
    """The shape of the first layer with attention."""
    plain = grouped_shape(row.reader.without("num_key_value_heads"))
    return plain._replace(num_kv_heads=next(filter(None, kv_heads), plain.num_heads))


def mlps(row: Row) -> list[tuple[Weight, ...]]:
    """The MLP of every layer, and the norms of attention and MLP.

    A square linear map may replace either, with its norm; a no-op has nothing. The width of an MLP is rounded up.
    """
    config, width = row.reader, row["hidden_size"]
    if not config.has("block_configs"):
        raise config.error("the weights of a model without block_configs are not counted")
    blocks = []
    for block in config.objects("block_configs"):
        attention, ffn = block.nested("attention"), block.nested("ffn")
        made: list[Weight] = []
        if attention.boolean("replace_with_linear", default=False):
            made.append(linear("self_attn.linear_attn", width, width))
        if not attention.boolean("no_op", default=False):
            made.append(norm("input_layernorm", width))
        if not ffn.boolean("no_op", default=False):
            if ffn.boolean("replace_with_linear", default=False):
                made.append(linear("mlp.linear_mlp", width, width))
            else:
                wide = 2 * ffn.number("ffn_mult", default=1.0) * width
                inner = ffn.optional_integer("intermediate_size") or round_up(int(wide / 3), 256)
                made += gated_mlp("mlp", width, inner)
            made.append(norm("post_attention_layernorm", width))
        blocks.append((*made,))
    return blocks
