"""MiniMax-M3: grouped attention with an indexer in most layers, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.families.minimax_m3 import sparse_layers
from kvcalc.model.reader import ConfigReader
from kvcalc.model.weights.decoder import moe, with_defaults
from kvcalc.model.weights.decoder_layouts import Experts
from kvcalc.model.weights.tensors import (
    Block,
    ModelWeights,
    Weight,
    around,
    gated_mlp,
    grouped_attention,
    linear,
    norm,
    remaining,
)

# Source: MiniMaxM3VLTextConfig, Transformers 5.23.0.
_DEFAULTS = {
    "vocab_size": 200064, "intermediate_size": 3072, "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "num_local_experts": 128, "num_experts_per_tok": 4,
}  # fmt: skip
_EXPERTS = Experts(inner="intermediate_size", prefix="block_sparse_moe", names=("w1", "w3", "w2"))
_PREFIX = "model.layers.{}."


def weights(config: ConfigReader, model_type: str) -> ModelWeights:
    """Source: MiniMaxM3VLDecoderLayer, Transformers 5.23.0."""
    nested = config.config.get("sparse_attention_config")
    nested = nested if isinstance(nested, Mapping) else {}
    config.refuse("attention_output_gate", "the weights this adds are not counted")
    config = with_defaults(config, _DEFAULTS)
    width, vocab = config.integer("hidden_size"), config.integer("vocab_size")
    num_layers = config.num_layers("num_hidden_layers")
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    attention = (
        *grouped_attention("self_attn", width, heads, config.integer("num_key_value_heads"), head_dim),
        norm("self_attn.q_norm", head_dim),
        norm("self_attn.k_norm", head_dim),
        norm("input_layernorm", width),
        norm("post_attention_layernorm", width),
    )
    indexed = [n for n, has in enumerate(sparse_layers(config, nested, num_layers)) if has]
    expert_layers = _expert_layers(config, num_layers)
    shared = gated_mlp("block_sparse_moe.shared_experts", width, config.integer("shared_intermediate_size"))
    dense = gated_mlp("mlp", width, config.integer("dense_intermediate_size"))
    blocks = (
        Block(_PREFIX, range(num_layers), attention),
        Block(_PREFIX, indexed, _indexer(config, nested, width)),
        Block(_PREFIX, expert_layers, (*moe(config, _EXPERTS, width), *shared)),
        Block(_PREFIX, remaining(num_layers, expert_layers), dense),
    )
    tied = config.boolean("tie_word_embeddings", default=False)
    embedding, ends = around(vocab, width, tied, norm("model.norm", width))
    return ModelWeights(embedding, tied, (*blocks, ends))


def _indexer(config: ConfigReader, nested: Mapping[str, object], width: int) -> tuple[Weight, ...]:
    """One key for all index heads, its number of heads under the published config's own key or Transformers'."""
    inner = ConfigReader(nested, f"{config.name}: sparse_attention_config", config.source)
    heads = inner.optional_integer("sparse_num_index_heads") or config.optional_integer("index_n_heads") or 4
    head_dim = config.integer("index_head_dim")
    return (
        linear("self_attn.indexer.q_proj", width, heads * head_dim),
        linear("self_attn.indexer.k_proj", width, head_dim),
        norm("self_attn.indexer.q_norm", head_dim),
        norm("self_attn.indexer.k_norm", head_dim),
    )


def _expert_layers(config: ConfigReader, num_layers: int) -> list[int]:
    """All, unless mlp_layer_types or moe_layer_freq says otherwise.

    first_k_dense_replace, which some published configs have instead, is not read by Transformers: no count there.
    """
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    if kinds is not None:
        return [number for number, kind in enumerate(kinds) if kind == "sparse"]
    if config.config.get("moe_layer_freq") is not None:
        return [number for number, has in enumerate(config.flags("moe_layer_freq", num_layers)) if has]
    if config.optional_integer("first_k_dense_replace", least=0):
        raise config.error("first_k_dense_replace without moe_layer_freq: Transformers reads the latter alone")
    return [*range(num_layers)]
