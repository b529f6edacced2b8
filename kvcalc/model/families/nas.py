"""Nemotron-NAS and DeciLM: decoders of which a search chose the attention and the MLP of each layer."""

from __future__ import annotations

from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, gated_mlp, linear, norm

# The width of an MLP is rounded up to a multiple of it.
_MULTIPLE = 256
# Keys of a layer's attention that would make it keep something other than all of its K and V.
_OTHER_CACHES = (
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "unshifted_sink",
    "use_prefill_window_in_sink_attention",
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Nemotron-NAS (Llama-3.3-Nemotron-Super and Ultra) and DeciLM: a search chose the attention of each layer.

    K and V of heads / n_heads_in_group heads. A layer with no attention, or a linear map instead, keeps nothing.

    Source: modeling_decilm.py of nvidia/Llama-3_3-Nemotron-Super-49B-v1, and of Deci/DeciLM-7B, which lists
    num_key_value_heads_per_layer instead of block_configs.
    """
    num_layers = config.num_layers("num_hidden_layers")
    plain = grouped_shape(config.without("num_key_value_heads"))
    num_heads = plain.num_heads
    counts = _kv_heads(config, num_layers, num_heads)
    kept: dict[int, tuple[Attention, ...]] = {0: ()}
    for heads in counts:
        if heads not in kept:
            kept[heads] = (Attention(plain._replace(num_kv_heads=config.check_groups(num_heads, heads))),)
    first = next((heads for heads in counts if heads), num_heads)
    mixers = [kept[n] for n in counts]
    return config.model(model_type, mixers, lambda: _body(config), attention=plain._replace(num_kv_heads=first))


def _body(config: ConfigReader) -> Body:
    """Attention and MLP each have a norm. A square linear map may replace either, with its norm; a no-op has nothing.

    Source: DeciLMDecoderLayer (model_executor/models/nemotron_nas.py), vLLM 0.33.0, which has no linear maps.
    """
    if not config.has("block_configs"):
        raise config.error("the weights of a model without block_configs are not counted")
    width = config.integer("hidden_size")
    made: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    mlps = []
    for block in config.objects("block_configs"):
        attention, found = block.nested("attention"), _mlp(config, block.nested("ffn"), width)
        if not attention.boolean("no_op", default=False):
            found = (norm("input_layernorm", width), *found)
        if attention.boolean("replace_with_linear", default=False):
            found = (linear("self_attn.linear_attn", width, width), *found)
        mlps.append(made.setdefault(found, found))
    return decoder_body(config, mlps, norms=())


def _mlp(config: ConfigReader, ffn: ConfigReader, width: int) -> tuple[Weight, ...]:
    if ffn.boolean("no_op", default=False):
        return ()
    last = norm("post_attention_layernorm", width)
    if ffn.boolean("replace_with_linear", default=False):
        return (linear("mlp.linear_mlp", width, width), last)
    inner = ffn.optional_integer("intermediate_size")
    if inner is None:
        inner = -(-int(2 * ffn.number("ffn_mult", default=1.0) * width / 3) // _MULTIPLE) * _MULTIPLE
    return (*gated_mlp("mlp", width, inner), last)


def _kv_heads(config: ConfigReader, num_layers: int, num_heads: int) -> list[int]:
    """Return the number of KV heads of every layer, 0 if it keeps nothing."""
    key = "block_configs" if config.has("block_configs") else "num_key_value_heads_per_layer"
    if config.number_of(key, 0) != num_layers:
        raise config.error(f"{key} must be a list of {num_layers}, one per layer")
    if key == "block_configs":
        return [_block_kv_heads(config, block, num_heads) for block in config.objects(key)]
    return config.integers(key, least=1)


def _block_kv_heads(config: ConfigReader, block: ConfigReader, num_heads: int) -> int:
    attention = block.nested("attention")
    if not block.has("attention"):
        raise config.error("block_configs: a layer has no attention object")
    if attention.boolean("no_op", default=False) or attention.boolean("replace_with_linear", default=False):
        return 0
    for key in _OTHER_CACHES:
        attention.refuse(key, "block_configs: the cache of this layer is not supported")
    group = attention.integer("n_heads_in_group")
    return num_heads // config.check_groups(num_heads, group)
