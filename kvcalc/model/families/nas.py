"""Nemotron-NAS (Llama-3.3-Nemotron-Super and Ultra) and DeciLM: an architecture search chose each layer's attention."""

from __future__ import annotations

from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec

# Keys of a layer's attention that would make it keep something other than all of its K and V.
_OTHER_CACHES = (
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "unshifted_sink",
    "use_prefill_window_in_sink_attention",
)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """K and V of heads / n_heads_in_group heads. A layer with no attention, or a linear map instead, keeps nothing.

    Source: modeling_decilm.py of nvidia/Llama-3_3-Nemotron-Super-49B-v1, and of Deci/DeciLM-7B, which lists
    num_key_value_heads_per_layer instead of block_configs.
    """
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.head_dim(hidden_size, num_heads)
    bias = config.boolean("attention_bias", default=False)
    plain = AttentionShape(
        num_heads, num_heads, head_dim, head_dim, hidden_size, qkv_bias=bias, output_bias=bias, rope_dim=head_dim,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    counts = _kv_heads(config, num_layers, num_heads)
    kept: dict[int, tuple[Attention, ...]] = {0: ()}
    for heads in counts:
        if heads not in kept:
            kept[heads] = (Attention(plain._replace(num_kv_heads=config.check_groups(num_heads, heads))),)
    first = next((heads for heads in counts if heads), num_heads)
    return config.model(model_type, [kept[n] for n in counts], attention=plain._replace(num_kv_heads=first))


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
