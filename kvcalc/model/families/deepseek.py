"""Multi-head latent attention: DeepSeek V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, MiniCPM3, LongCat-Flash, others."""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.errors import ModelError
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape, hyper_connection, latent_shape
from kvcalc.model.families.indexers import has_indexer, indexer
from kvcalc.model.mixers.attention import Attention, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Block, Weight, gated_mlp, norm
from kvcalc.model.type_tables import defaults_of

# Types whose weights are not counted. For longcat_flash the reason is that Transformers 5.23.0 counts matrices for
# experts that compute nothing, and the published count does not.
_LONGCAT = ("longcat_flash", "longcat_flash_ngram")
_NOT_COUNTED = (*_LONGCAT, "axk2", "pangu_ultra_moe", "sarvam_mla")
# Types without experts.
_DENSE = ("minicpm3", "youtu", "youtu_llm")
# Types whose configs may list the kind of MLP of every layer.
_LISTED = ("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "hy_v4")
# The kinds in layer_types without and with an indexer. The second name with an indexer is that of older releases.
_LAYER_TYPES = (("full_attention",), ("indexed_attention", "deepseek_sparse_attention"))
_INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A layer keeps one latent (kv_lora_rank) and one rotary key (qk_rope_head_dim) per token, and maybe indexer keys.

    A null q_lora_rank means an uncompressed query (V2-Lite). Layers for multi-token prediction are not part of the
    model that decodes. Source: DeepSeek-V2 paper, section 2.1; DeepseekV3Attention, Transformers 5.23.0.
    """
    config = with_defaults(config, defaults_of(model_type))
    if not config.boolean("use_mla", default=True):
        return _without_latent(config, model_type)
    num_layers = _num_layers(config, model_type)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    v_head_dim = config.optional_integer("v_head_dim") if model_type == "minicpm3" else config.integer("v_head_dim")
    if v_head_dim is None:
        if hidden_size % num_heads:
            raise ModelError(
                f"{config.name}: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}"
            )
        v_head_dim = hidden_size // num_heads
    bias = config.boolean("attention_bias", default=False)
    is_gated = model_type == "hy_v4"
    shape = latent_shape(config, v_head_dim=v_head_dim)._replace(qkv_bias=bias, output_bias=bias, output_gate=is_gated)
    if any(kind not in _LAYER_TYPES[model_type in _INDEXED] for kind in config.items("layer_types")):
        raise ModelError(f"{config.name}: layer_types contains a kind of layer that {model_type} does not have")
    plain = (Attention(shape, names=Projections(gate="gate_proj", has_sinks=is_gated)),)
    mixers = [plain] * num_layers
    if model_type in _INDEXED:
        sparse = plain[0]._replace(most_read_tokens=config.integer("index_topk"))
        shared, indexed = (sparse,), (sparse._replace(indexer=indexer(config, shape)),)
        mixers = [indexed if has else shared for has in has_indexer(config, model_type, num_layers)]
    body = None if model_type in _NOT_COUNTED else lambda: _body(config, model_type, num_layers)
    return config.model(model_type, mixers, body)


def _without_latent(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read DeepSeek-OCR and the smallest DeepSeek-VL2: DeepSeek-V2's experts, and K and V in every layer.

    The type is that of DeepSeek's first model with experts, whose attention it has. Source: DeepseekV2DecoderLayer
    (use_mha), model_executor/models/deepseek_v2.py, vLLM 0.33.0.
    """
    if model_type != "deepseek_v2":
        raise ModelError(f"{config.name}: use_mla is false: {model_type} without its latent is not supported")
    num_layers, shape = _num_layers(config, model_type), grouped_shape(config)
    mixers = [(Attention(shape),)] * num_layers
    return config.model("deepseek", mixers, lambda: _body(config, model_type, num_layers), attention=shape)


def _body(config: ConfigReader, model_type: str, num_layers: int) -> Body:
    """Return the weights outside the mixers. Layers after the first dense ones have experts."""
    if not config.is_any("moe_layer_freq", None, 1):
        raise ModelError(f"{config.name}: moe_layer_freq: only 1 is supported")
    if model_type in _INDEXED:
        config.integer("q_lora_rank")  # the indexer computes its queries from it
    width = config.integer("hidden_size")
    sparse: Collection[int] = () if model_type in _DENSE else _sparse_layers(config, model_type, num_layers)
    dense: tuple[Weight, ...] = ()
    if len(sparse) < num_layers:
        bias = config.boolean("mlp_bias", default=False)
        dense = gated_mlp("mlp", width, config.integer("intermediate_size"), bias)
    experts = moe(config, Experts("n_routed_experts", shared=True), width) if sparse else ()
    if model_type == "axk1":
        experts += (norm("mlp.post_mlp_layernorm", width),)
    body = decoder_body(config, choose(num_layers, sparse, experts, dense), tied=model_type in _DENSE)
    return _with_streams(config, body) if model_type == "hy_v4" else body


def _with_streams(config: ConfigReader, body: Body) -> Body:
    """Add the weights of hyper-connections (hc_mult residual streams) before attention and MLP, and before the head.

    They weigh the streams on the way in and out. Source: HYV4HyperConnection, Transformers 5.23.0.
    """
    width, streams = config.integer("hidden_size"), config.integer("hc_mult")
    own = (
        weight for name in ("attn_hc", "ffn_hc") for weight in hyper_connection(name, width, streams, 2 * streams, 2)
    )
    body = body._replace(norms=(*body.norms, *own))
    if body.around is None:
        return body
    head = Block("", (0,), hyper_connection("model.hc_head", width, streams, streams, 1))
    return body._replace(around=body.around._replace(blocks=(*body.around.blocks, head)))


def _sparse_layers(config: ConfigReader, model_type: str, num_layers: int) -> Collection[int]:
    # The class of GLM-4.7-Flash reads only the list. Without a list, the first layer is dense.
    if model_type == "glm4_moe_lite":
        return listed_sparse_layers(config, num_layers, range(1, num_layers))
    if model_type in _LISTED and config.has("mlp_layer_types"):
        return listed_sparse_layers(config, num_layers, ())
    return range(min(config.integer("first_k_dense_replace", least=0), num_layers), num_layers)


def _num_layers(config: ConfigReader, model_type: str) -> int:
    """Return the number of layers. LongCat-Flash has two attention layers in each of its num_layers blocks."""
    if model_type not in _LONGCAT:
        return config.num_layers("num_hidden_layers")
    blocks = config.num_layers("num_layers")
    stated = config.optional_integer("num_hidden_layers")
    if stated not in (None, blocks, 2 * blocks):
        raise ModelError(f"{config.name}: num_layers is {blocks} but num_hidden_layers is {stated}")
    return 2 * blocks
