"""MiniMax-Text-01 and MiniMax-M1 with lightning attention, and MiniMax-M3 with an indexer."""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape, Indexer, Projections
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp, linear, norm, replicated
from kvcalc.model.type_tables import defaults_of

_EXPERTS_MINIMAX = Experts(inner="intermediate_size", prefix="block_sparse_moe", names=("w1", "w3", "w2"))


def read_minimax(config: ConfigReader, model_type: str) -> ModelSpec:
    """MiniMax-Text-01 and MiniMax-M1: lightning attention, and full attention in some layers.

    Lightning attention keeps head_dim x head_dim elements per head in the model's dtype. It has no convolution.

    Without layer_types, layers of full attention and of lightning attention alternate. Source: MiniMaxConfig and
    MiniMaxLightningAttention, Transformers 5.23.0. The published configs (minimax_text_01 and minimax_m1) have ones for
    full attention in attn_type_list instead.
    """
    config = with_defaults(config, defaults_of(model_type))
    config.refuse("sliding_window", "windows are not supported for this family")
    num_layers = config.num_layers("num_hidden_layers")
    # The projections have no biases, whatever attention_bias says.
    shape = grouped_shape(config)._replace(qkv_bias=False, output_bias=False)
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape),), "linear_attention": (_lightning(shape),),
    }  # fmt: skip
    mixers = [kept[kind] for kind in _layer_types(config, num_layers)]
    return config.model("minimax", mixers, lambda: _body_minimax(config, num_layers), attention=shape)


def _lightning(shape: AttentionShape) -> Recurrence:
    width, inner = shape.hidden_size or 0, shape.num_heads * shape.qk_head_dim
    state = RecurrentState(0, 1, inner * shape.qk_head_dim, state_dtype=None, num_heads=shape.num_heads)
    weights = (
        linear("self_attn.qkv_proj", width, 3 * inner),
        linear("self_attn.output_gate", width, inner),
        linear("self_attn.out_proj", inner, width),
        norm("self_attn.norm", inner),
    )
    return Recurrence(state, weights=weights)


def _body_minimax(config: ConfigReader, num_layers: int) -> Body:
    """Source: MiniMaxDecoderLayer, Transformers 5.23.0."""
    if config.optional_integer("shared_intermediate_size", least=0):
        raise config.error("shared_intermediate_size: shared experts of this family are not counted")
    return decoder_body(config, [moe(config, _EXPERTS_MINIMAX, config.integer("hidden_size"))] * num_layers)


def _layer_types(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the config's list, else alternate full attention and lightning attention."""
    kinds = config.strings("layer_types", num_layers, ("full_attention", "linear_attention"))
    if kinds is not None:
        return kinds
    if config.has("attn_type_list"):
        flags = config.flags("attn_type_list", num_layers)
        return ["full_attention" if flag else "linear_attention" for flag in flags]
    return ["linear_attention" if number % 2 else "full_attention" for number in range(num_layers)]


_EXPERTS_MINIMAX_M3 = Experts(inner="intermediate_size", prefix="block_sparse_moe", names=("w1", "w3", "w2"))
_NESTED = {
    "sparse_index_dim": "index_head_dim", "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
}  # fmt: skip
_KINDS = ("full_attention", "minimax_m3_sparse")


def read_minimax_m3(config: ConfigReader, model_type: str) -> ModelSpec:
    """MiniMax-M3: grouped attention. In most layers, an indexer with its own keys picks the blocks that a step reads.

    Sparse layers also keep one index key (index_head_dim) per token, shared by all index_n_heads index heads.

    A step reads only the index_topk_blocks blocks that the indexer picks. Source: MiniMaxM3VLSparseAttention,
    Transformers 5.23.0.
    """
    nested = config.nested("sparse_attention_config")
    config = with_defaults(config, {**defaults_of(model_type), **nested.shares(_NESTED)})
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)._replace(qkv_bias=False, output_bias=False)
    read_tokens = config.integer("index_topk_blocks") * config.integer("index_block_size")
    heads = nested.optional_integer("sparse_num_index_heads") or config.optional_integer("index_n_heads") or 4
    names = Projections(qk_norm="head")
    full = (Attention(shape, names=names),)
    indexer = _indexer(heads, config.integer("index_head_dim"), config.integer("hidden_size"))
    sparse = (Attention(shape, most_read_tokens=read_tokens, indexer=indexer, names=names),)
    mixers = [sparse if is_sparse else full for is_sparse in _sparse_layers(config, nested, num_layers)]
    return config.model(model_type, mixers, lambda: _body_minimax_m3(config, num_layers), attention=shape)


def _indexer(heads: int, head_dim: int, width: int) -> Indexer:
    """Return the indexer. All index heads share one key, so every rank holds it."""
    weights = (
        linear("self_attn.index_q_proj", width, heads * head_dim),
        replicated("self_attn.index_k_proj", width, head_dim),
        norm("self_attn.index_q_norm", head_dim),
        norm("self_attn.index_k_norm", head_dim),
    )
    return Indexer(heads, head_dim, weights)


def _body_minimax_m3(config: ConfigReader, num_layers: int) -> Body:
    """Experts with one shared expert. Source: MiniMaxM3VLDecoderLayer, Transformers 5.23.0."""
    config.refuse("attention_output_gate", "the weights that it adds are not counted")
    width = config.integer("hidden_size")
    shared = gated_mlp("block_sparse_moe.shared_experts", width, config.integer("shared_intermediate_size"))
    dense = gated_mlp("mlp", width, config.integer("dense_intermediate_size"))
    sparse = (*moe(config, _EXPERTS_MINIMAX_M3, width), *shared)
    return decoder_body(config, choose(num_layers, _expert_layers(config, num_layers), sparse, dense))


def _expert_layers(config: ConfigReader, num_layers: int) -> Collection[int]:
    """Return the layers with experts: all layers, unless mlp_layer_types or moe_layer_freq says otherwise.

    Some published configs have first_k_dense_replace instead. Transformers ignores it, so their weights are not
    counted.
    """
    default: Collection[int] = range(num_layers)
    if not config.has("mlp_layer_types"):
        if config.has("moe_layer_freq"):
            default = [number for number, has in enumerate(config.flags("moe_layer_freq", num_layers)) if has]
        elif config.optional_integer("first_k_dense_replace", least=0):
            raise config.error("first_k_dense_replace without moe_layer_freq: Transformers reads only the latter")
    return listed_sparse_layers(config, num_layers, default)


def _sparse_layers(config: ConfigReader, nested: ConfigReader, num_layers: int) -> list[bool]:
    """Return for each layer whether it has an indexer.

    This is stated in layer_types, else in sparse_attention_freq of sparse_attention_config.
    """
    kinds = config.strings("layer_types", num_layers, _KINDS)
    if kinds is not None:
        return [kind == "minimax_m3_sparse" for kind in kinds]
    if not nested.has("sparse_attention_freq") or not nested.boolean("use_sparse_attention", default=True):
        return [False] * num_layers
    return nested.flags("sparse_attention_freq", num_layers)
