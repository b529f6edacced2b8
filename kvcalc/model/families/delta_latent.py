"""Linear attention in most layers, and MLA in the others.

Kimi Linear, Kimi K3, Ling 3 and GLM-5-Next have Kimi delta attention; Ling 2.5 and 2.6 have lightning attention.
"""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, sparse_layers, with_defaults
from kvcalc.model.families.common import decoder_body, latent_shape
from kvcalc.model.families.deepseek import has_indexer, indexer, with_streams
from kvcalc.model.families.gated_delta import layer_types
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Indexer
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, gated_mlp, linear, norm, other, replicated
from kvcalc.model.type_tables import defaults_of

_NESTED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
           "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip


def read_kimi_linear(config: ConfigReader, model_type: str) -> ModelSpec:
    """Kimi Linear and Kimi K3: Kimi delta attention, and MLA in every fourth layer.

    Layers with full attention keep a latent and a rotary key.

    The other layers keep a state of head_dim x head_dim per head, in fp32, and the inputs of convolutions over queries,
    keys and values. Source: KimiLinearDeltaAttention, Transformers 5.23.0.
    """
    nested = config.nested("linear_attn_config")
    config = with_defaults(config, {**defaults_of(model_type), **stated_delta_attention(config)})
    num_layers = config.num_layers("num_hidden_layers")
    shape = latent_shape(config)._replace(output_gate=config.is_set("mla_use_output_gate"))
    if config.boolean("attention_bias", default=False):
        shape = shape._replace(qkv_bias=True, output_bias=True)
    delta = delta_attention(config, shape.hidden_size or 0, "f" if nested.is_set("use_full_rank_gate") else "fg")
    kept: tuple[tuple[Mixer, ...], tuple[Mixer, ...]] = (
        (delta,), (Attention(shape),),
    )  # fmt: skip
    return config.model(
        model_type,
        [kept[is_full] for is_full in _full_layers(config, nested, num_layers)],
        lambda: _body(config, num_layers),
        attention=shape,
        positions=("max_position_embeddings", "model_max_length"),
    )


def stated_delta_attention(config: ConfigReader) -> dict[str, object]:
    """The widths of the delta attention that `linear_attn_config` states, under the keys of a flat config."""
    return config.nested("linear_attn_config").shares(_NESTED)


def delta_attention(config: ConfigReader, width: int, low_ranks: str = "fg") -> Recurrence:
    """Convolutions over queries, keys and values, and a state of head_dim x head_dim per head, in fp32.

    The decay (f) and the gate of the output (g) each have two matrices of rank head_dim if they are in `low_ranks`,
    else one. Source: KimiLinearDeltaAttention and BailingHybridKDA, Transformers 5.23.0; for Kimi K3,
    KimiK3DeltaAttention, vLLM 0.33.0.
    """
    heads, head_dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    inner, kernel = heads * head_dim, config.integer("linear_conv_kernel_dim")
    weights = (
        *(linear(f"self_attn.{name}_proj", width, inner) for name in "qkv"),
        linear("self_attn.o_proj", inner, width),
        linear("self_attn.b_proj", width, heads),
        *(linear(f"self_attn.{name}_a_proj", width, head_dim) for name in low_ranks),
        *(linear(f"self_attn.{name}_b_proj", head_dim, inner) for name in low_ranks),
        *(linear(f"self_attn.{name}_proj", width, inner) for name in "fg" if name not in low_ranks),
        other("self_attn.conv1d", 3 * inner * kernel),
        other("self_attn.dt_bias", inner),
        other("self_attn.A_log", heads),
        norm("self_attn.o_norm", head_dim),
    )
    state = RecurrentState(3 * inner, kernel, heads * head_dim * head_dim, num_heads=heads)
    return Recurrence(state, "delta", heads, heads, head_dim, head_dim, weights)


def _body(config: ConfigReader, num_layers: int) -> Body:
    """The weights outside the mixers.

    In Kimi K3 the routed experts read and write a narrower vector, and every part of a layer adds a weighted sum of
    earlier blocks of attn_res_block_size layers. Source: KimiLinearDecoderLayer and KimiLinearConfig, Transformers
    5.23.0; for Kimi K3, KimiMoE and KimiDecoderLayer (models/kimi_k3), vLLM 0.33.0.
    """
    if not config.is_any("moe_layer_freq", None, 1):
        raise config.error("moe_layer_freq: only 1 is supported")
    sized = config.with_defaults({
        "num_experts_per_tok": config.optional_integer("num_experts_per_tok", "num_experts_per_token") or 8,
        "n_shared_experts": config.optional_integer("n_shared_experts", "num_shared_experts") or 1,
    })  # fmt: skip
    width = config.integer("hidden_size")
    first = config.optional_integer("first_k_dense_replace", least=0)
    default = range(min(1 if first is None else first, num_layers), num_layers)
    sparse = _narrowed(config, moe(sized, Experts("num_local_experts", shared=True), width), width)
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    layers = listed_sparse_layers(config, num_layers, default)
    mlps = choose(num_layers, layers, sparse, dense)
    if not config.is_set("attn_res_block_size"):
        return decoder_body(config, mlps)
    body = decoder_body(config, mlps, norm("model.output_attn_res_norm", width), _sum("model.output_attn_res", width))
    more = (
        norm("self_attention_res_norm", width), norm("mlp_res_norm", width),
        _sum("self_attention_res", width), _sum("mlp_res", width),
    )  # fmt: skip
    return body._replace(norms=(*body.norms, *more))


def _sum(name: str, width: int) -> Weight:
    """The weights of a sum over earlier blocks."""
    return other(f"{name}_proj", 1, width)


def _narrowed(config: ConfigReader, weights: tuple[Weight, ...], width: int) -> tuple[Weight, ...]:
    """Return the weights of experts, with routed experts that read routed_expert_hidden_size elements (Kimi K3)."""
    narrow = config.optional_integer("routed_expert_hidden_size")
    if narrow is None:
        return weights
    names = {width: narrow}
    routed = [
        each._replace(rows=names.get(each.rows, each.rows), columns=names.get(each.columns, each.columns))
        if each.copies > 1 else each for each in weights
    ]  # fmt: skip
    scale = (norm("mlp.routed_expert_norm", narrow),) if config.is_set("latent_moe_use_norm") else ()
    ends = (
        replicated("mlp.routed_expert_down_proj", width, narrow), replicated("mlp.routed_expert_up_proj", narrow, width)
    )  # fmt: skip
    return (*routed, *ends, *scale)


def _full_layers(config: ConfigReader, nested: ConfigReader, num_layers: int) -> list[bool]:
    """Return for each layer whether it has full attention.

    linear_attn_config lists each layer once, counted from 1, in full_attn_layers or in kda_layers.
    """
    kinds = config.strings("layer_types", num_layers, ("linear_attention", "full_attention"))
    if kinds is not None:
        return [kind == "full_attention" for kind in kinds]
    if not nested.mentions("full_attn_layers") or not nested.mentions("kda_layers"):
        raise config.error("layer_types is missing, and so are full_attn_layers or kda_layers in linear_attn_config")
    full, delta = (nested.integers(key, least=1, most=num_layers) for key in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        raise config.error(f"full_attn_layers and kda_layers must list each of {num_layers} layers once")
    return [number in full for number in range(1, num_layers + 1)]


def read_delta_latent(config: ConfigReader, model_type: str) -> ModelSpec:
    """Ling 3 (bailing_hybrid) and GLM-5-Next: Kimi delta attention in most layers, and MLA in the others.

    Every layer_group_size-th layer keeps a latent and, in Ling 3, a rotary key. The others keep a state.

    In Ling 3, the delta attention has the heads of attention, of head_dim. Transformers overwrites head_dim when it
    saves a config, and adds linear_head_dim. Ling 2.5's config has the same type, and a group_norm_size. GLM-5-Next has
    no rotary key and an indexer. The indexer pools keys by learned gates, and keeps the key, the gate and one flag of
    every token. Source: BailingHybridConfig, Glm5NextTextConfig and Glm5NextTextIndexer, Transformers 5.23.0.
    """
    is_glm = model_type == "glm5_next_text"
    if not is_glm and config.has("group_norm_size"):
        return read_lightning_latent(config, model_type)
    stated = stated_delta_attention(config) if is_glm else {}
    config = config.with_defaults({**defaults_of(model_type), **stated})
    if not is_glm:
        config = config.with_defaults({
            "linear_head_dim": config.optional_integer("head_dim") or 128,
            "linear_num_heads": config.integer("num_attention_heads"),
            "linear_conv_kernel_dim": config.integer("short_conv_kernel_size"),
        })  # fmt: skip
    num_layers = config.num_layers("num_hidden_layers")
    shape = latent_shape(config, least_rope=0)._replace(head_gate=not is_glm)
    full = [Attention(shape)] * num_layers
    if is_glm:
        sparse = Attention(shape, most_read_tokens=config.integer("index_topk"))
        head_dim, pool = config.integer("index_head_dim"), config.integer("index_kpool")
        own = indexer(config, shape)
        pooling = (
            other("self_attn.indexer.index_kpool_compress_ape", pool, head_dim),
            other("self_attn.indexer.index_kpool_compress_gate", head_dim, shape.hidden_size or 0),
        )
        indexed = sparse._replace(indexer=Indexer(own.num_heads, 2 * head_dim + 1, (*own.weights, *pooling)))
        full = [indexed if has else sparse for has in has_indexer(config, model_type, num_layers)]
    made: dict[int, tuple[Mixer, ...]] = {id(each): (each,) for each in full}
    delta: tuple[Mixer, ...] = (delta_attention(config, shape.hidden_size or 0, "fg" if is_glm else ""),)
    kinds = layer_types(config, num_layers, "indexed_attention", interval="layer_group_size")
    mixers = [delta if kind == "linear_attention" else made[id(full[number])] for number, kind in enumerate(kinds)]
    return config.model(
        model_type, mixers, lambda: _body_of_layers(config, num_layers, is_glm), attention=shape,
        positions=("max_position_embeddings", "model_max_length"),
    )  # fmt: skip


def _body_of_layers(config: ConfigReader, num_layers: int, is_glm: bool) -> Body:
    """Source: BailingHybridDecoderLayer and Glm5NextDecoderLayer, Transformers 5.23.0."""
    width = config.integer("hidden_size")
    sized = config.with_defaults(config.shares({"num_experts_per_token": "num_experts_per_tok"}))
    rule = Experts("num_experts", layers="listed", shared=True)
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    mlps = choose(num_layers, sparse_layers(sized, rule, num_layers), moe(sized, rule, width), dense)
    body = decoder_body(config, mlps)
    return with_streams(config, body, has_head=False, mixes=True) if is_glm else body


def read_lightning_latent(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer_group_size-th layer keeps a latent and a rotary key.

    The others keep head_dim x head_dim elements per head, in the model's dtype, without a convolution. Source:
    BailingMoeV25DecoderLayer (bailing_moe_linear.py) and BailingMoELinearAttention, vLLM 0.33.0.
    """
    config = with_defaults(config, defaults_of("bailing_moe_v2_5"))
    num_layers, shape = config.num_layers("num_hidden_layers"), latent_shape(config)
    kept: dict[str, tuple[Mixer, ...]] = {
        "full_attention": (Attention(shape),), "linear_attention": (_lightning(config, shape.hidden_size or 0),),
    }  # fmt: skip
    mixers = [kept[kind] for kind in layer_types(config, num_layers, interval="layer_group_size")]
    return config.model("bailing_moe_v2_5", mixers, lambda: _lightning_body(config, num_layers), attention=shape)


def _lightning(config: ConfigReader, width: int) -> Recurrence:
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    inner, bias = heads * head_dim, config.boolean("use_bias", default=False)
    weights: tuple[Weight, ...] = (
        linear("self_attn.query_key_value", width, 3 * inner, bias or config.boolean("use_qkv_bias", default=False)),
        linear("self_attn.g_proj", width, inner),
        linear("self_attn.dense", inner, width, bias),
        norm("self_attn.g_norm", inner),
    )
    if config.boolean("use_qk_norm", default=False):
        weights += tuple(norm(f"self_attn.{name}_layernorm", head_dim) for name in ("query", "key"))
    state = RecurrentState(0, 1, inner * head_dim, state_dtype=None, num_heads=heads)
    return Recurrence(state, weights=weights)


def _lightning_body(config: ConfigReader, num_layers: int) -> Body:
    width = config.integer("hidden_size")
    rule = Experts("num_experts", layers="first_dense", shared=True, shared_inner="moe_shared_expert_intermediate_size")
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    sized = config.with_defaults({"moe_shared_expert_intermediate_size": config.integer("moe_intermediate_size")})
    mlps = choose(num_layers, sparse_layers(config, rule, num_layers), moe(sized, rule, width), dense)
    return decoder_body(config, mlps, embedding="model.word_embeddings")
