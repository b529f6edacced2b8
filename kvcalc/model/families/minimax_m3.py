"""MiniMax-M3: grouped attention; in most layers an indexer's keys beside K and V pick the blocks a step reads."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.model.caches import Cache, IndexerKeys
from kvcalc.model.families.grouped import GROUPED_KEYS, full_attention, grouped_shape
from kvcalc.model.reader import ConfigReader
from kvcalc.model.spec import ModelSpec, group_layers

KEYS = frozenset(
    (
        *GROUPED_KEYS,
        *(
            "sparse_attention_config layer_types index_n_heads index_head_dim index_block_size index_topk_blocks "
            "index_local_blocks rotary_dim partial_rotary_factor moe_layer_freq mlp_layer_types num_local_experts "
            "num_experts_per_tok n_shared_experts dense_intermediate_size shared_intermediate_size "
            "moe_intermediate_size first_k_dense_replace num_mtp_modules num_nextn_predict_layers qk_norm_type "
            "use_qk_norm attention_output_gate"
        ).split(),
    )
)

# Source: MiniMaxM3VLTextConfig, Transformers 5.23.0.
_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 128, "index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16,
}  # fmt: skip
_NESTED = {
    "sparse_index_dim": "index_head_dim", "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
}  # fmt: skip
_KINDS = ("full_attention", "minimax_m3_sparse")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """One index key of index_head_dim a token in sparse layers, whatever index_n_heads: keys are shared by its heads.

    A step reads the index_topk_blocks blocks picked and no others. Source: MiniMaxM3VLSparseAttention,
    Transformers 5.23.0.
    """
    nested = config.config.get("sparse_attention_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise config.error("sparse_attention_config must be an object")
    nested = nested or {}
    config = config.with_defaults(
        {**_DEFAULTS, **{flat: nested[key] for key, flat in _NESTED.items() if key in nested}}
    )
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    full = full_attention(shape)
    read_tokens = config.integer("index_topk_blocks") * config.integer("index_block_size")
    sparse: tuple[Cache, ...] = (
        full._replace(most_read_tokens=read_tokens), IndexerKeys(config.integer("index_head_dim")),
    )  # fmt: skip
    layers = group_layers(sparse if is_sparse else (full,) for is_sparse in sparse_layers(config, nested, num_layers))
    return config.model(model_type, shape, layers)


def sparse_layers(config: ConfigReader, nested: Mapping[str, object], num_layers: int) -> list[bool]:
    """Which layers have an indexer: by layer_types, else sparse_attention_freq of sparse_attention_config."""
    kinds = config.strings("layer_types", num_layers, _KINDS)
    if kinds is not None:
        return [kind == "minimax_m3_sparse" for kind in kinds]
    if nested.get("sparse_attention_freq") is None or nested.get("use_sparse_attention") is False:
        return [False] * num_layers
    inner = ConfigReader(nested, f"{config.name}: sparse_attention_config", config.source)
    return inner.flags("sparse_attention_freq", num_layers)
