"""Multi-head latent attention: DeepSeek V2 to V3.2, Kimi K2, GLM-4.7-Flash, GLM-5, MiniCPM3, LongCat-Flash, others."""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.errors import ModelError
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape, latent_shape
from kvcalc.model.mixers.attention import Attention, AttentionShape, Indexer, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Block, Weight, gated_mlp, norm, other, replicated
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


def indexer(config: ConfigReader, shape: AttentionShape) -> Indexer:
    """Return the indexer.

    Every rank holds its projections (ReplicatedLinear, DeepseekV2MLAAttention of vLLM 0.33.0), because all heads share
    its keys. Source: DeepseekV32Indexer, Transformers 5.23.0.
    """
    heads, head_dim = config.optional_integer("index_n_heads") or 1, config.integer("index_head_dim")
    width = shape.hidden_size or 0
    weights = (
        replicated("self_attn.indexer.wq_b", shape.q_lora_rank, heads * head_dim),
        replicated("self_attn.indexer.wk", width, head_dim),
        norm("self_attn.indexer.k_norm", head_dim, bias=True),
        # Published in 16 or 32 bits, although the other weights of the layer have 8 bits.
        other("self_attn.indexer.weights_proj", heads, width),
    )
    return Indexer(heads, head_dim, weights)


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
    return with_streams(config, body, has_head=True, mixes=False) if model_type == "hy_v4" else body


def with_streams(config: ConfigReader, body: Body, *, has_head: bool, mixes: bool) -> Body:
    """Add the weights of hyper-connections (hc_mult residual streams) before attention and MLP.

    They weigh the streams on the way in and out, and `mixes` says that they also mix them. `has_head`: the streams are
    weighed once more before the head. Source: HYV4HyperConnection and Glm5NextHyperConnection, Transformers 5.23.0.
    """
    width, streams = config.integer("hidden_size"), config.integer("hc_mult")
    rows = streams * (2 + streams * mixes)
    kinds = 2 + mixes

    def weights(name: str, rows: int, kinds: int) -> tuple[Weight, ...]:
        return other(f"{name}.fn", rows, streams * width), other(f"{name}.base", rows), other(f"{name}.scale", kinds)

    norms = (*body.norms, *weights("attn_hc", rows, kinds), *weights("ffn_hc", rows, kinds))
    if body.around is None or not has_head:
        return body._replace(norms=norms)
    head = Block("", (0,), weights("model.hc_head", streams, 1))
    return body._replace(norms=norms, around=body.around._replace(blocks=(*body.around.blocks, head)))


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


def has_indexer(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    """Return for each layer whether it has its own indexer. The others reuse the tokens picked by the last indexer.

    GLM-5.2 states this as a list (indexer_types), as a string of F and S (index_topk_pattern), or as a step
    (index_topk_freq) with an offset. Hunyuan 4 states a list; without one, the first layer and then every fourth layer
    from the second on have an indexer. Source: GlmMoeDsaConfig and HYV4Config, Transformers 5.23.0.
    """
    if model_type not in ("glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"):
        return [True] * num_layers
    kinds = config.strings("indexer_types", num_layers, ("full", "shared"))
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    if model_type == "hy_v4":
        return [number == 0 or number % 4 == 1 for number in range(num_layers)]
    must = f"must give F or S for each of {num_layers} layers"
    pattern = config.chosen("index_topk_pattern", {"F": True, "S": False, "full": True, "shared": False}, must)
    if pattern is not None:
        if len(pattern) != num_layers:
            raise config.error(f"index_topk_pattern {must}")
        return pattern
    step = max(config.optional_integer("index_topk_freq", least=0) or 1, 1)
    offset = config.optional_integer("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return [max(number - offset + 1, 0) % step == 0 for number in range(num_layers)]
