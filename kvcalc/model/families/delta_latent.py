"""Kimi delta attention in most layers, and MLA in the others: Kimi Linear, Kimi K3, Ling 3 and GLM-5-Next."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body, latent_shape
from kvcalc.model.families.deepseek import has_indexer
from kvcalc.model.families.gated_delta import layer_types
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, Indexer
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp, linear, norm, other
from kvcalc.model.type_tables import defaults_of

# Keys of Kimi K3 that add matrices which Transformers 5.23.0 does not build.
_NOT_BUILT = ("routed_expert_hidden_size", "mla_use_output_gate", "attn_res_block_size", "latent_moe_use_norm")
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
    shape = latent_shape(config)
    if config.boolean("attention_bias", default=False):
        shape = shape._replace(qkv_bias=True, output_bias=True)
    kept: tuple[tuple[Mixer, ...], tuple[Mixer, ...]] = (
        (delta_attention(config, shape.hidden_size or 0),), (Attention(shape),),
    )  # fmt: skip
    return config.model(
        model_type,
        [kept[is_full] for is_full in _full_layers(config, nested, num_layers)],
        lambda: _body(config, nested, num_layers),
        attention=shape,
        positions=("max_position_embeddings", "model_max_length"),
    )


def stated_delta_attention(config: ConfigReader) -> dict[str, object]:
    """The widths of the delta attention that `linear_attn_config` states, under the keys of a flat config."""
    return config.nested("linear_attn_config").shares(_NESTED)


def delta_attention(config: ConfigReader, width: int) -> Recurrence:
    """Convolutions over queries, keys and values, and a state of head_dim x head_dim per head, in fp32."""
    heads, head_dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    inner, kernel = heads * head_dim, config.integer("linear_conv_kernel_dim")
    weights = (
        *(linear(f"self_attn.{name}_proj", width, inner) for name in "qkv"),
        linear("self_attn.o_proj", inner, width),
        linear("self_attn.b_proj", width, heads),
        *(linear(f"self_attn.{name}_a_proj", width, head_dim) for name in "fg"),
        *(linear(f"self_attn.{name}_b_proj", head_dim, inner) for name in "fg"),
        other("self_attn.conv1d", 3 * inner * kernel),
        other("self_attn.dt_bias", inner),
        other("self_attn.A_log", heads),
        norm("self_attn.o_norm", head_dim),
    )
    state = RecurrentState(3 * inner, kernel, heads * head_dim * head_dim, num_heads=heads)
    return Recurrence(state, "delta", heads, heads, head_dim, head_dim, weights)


def _body(config: ConfigReader, nested: ConfigReader, num_layers: int) -> Body:
    """Source: KimiLinearDecoderLayer, KimiLinearConfig, Transformers 5.23.0."""
    for key in _NOT_BUILT:
        config.refuse(key, "the weights that it adds are not counted")
    if nested.is_set("use_full_rank_gate"):
        raise config.error("linear_attn_config.use_full_rank_gate: the weights that it adds are not counted")
    if not config.is_any("moe_layer_freq", None, 1):
        raise config.error("moe_layer_freq: only 1 is supported")
    sized = config.with_defaults({
        "num_experts_per_tok": config.optional_integer("num_experts_per_tok", "num_experts_per_token") or 8,
        "n_shared_experts": config.optional_integer("n_shared_experts", "num_shared_experts") or 1,
    })  # fmt: skip
    width = config.integer("hidden_size")
    first = config.optional_integer("first_k_dense_replace", least=0)
    default = range(min(1 if first is None else first, num_layers), num_layers)
    sparse = moe(sized, Experts("num_local_experts", shared=True), width)
    dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
    layers = listed_sparse_layers(config, num_layers, default)
    return decoder_body(config, choose(num_layers, layers, sparse, dense))


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
    saves a config, and adds linear_head_dim. GLM-5-Next has no rotary key and an indexer. The indexer pools keys by
    learned gates, and keeps the key, the gate and one flag of every token. Source: BailingHybridConfig,
    Glm5NextTextConfig and Glm5NextTextIndexer, Transformers 5.23.0.
    """
    is_glm = model_type == "glm5_next_text"
    stated = stated_delta_attention(config) if is_glm else {}
    config = config.with_defaults({**defaults_of(model_type), **stated})
    if not is_glm:
        config = config.with_defaults({
            "linear_head_dim": config.optional_integer("head_dim") or 128,
            "linear_num_heads": config.integer("num_attention_heads"),
            "linear_conv_kernel_dim": config.integer("short_conv_kernel_size"),
        })  # fmt: skip
    num_layers = config.num_layers("num_hidden_layers")
    shape = latent_shape(config, least_rope=0)
    full = [Attention(shape)] * num_layers
    if is_glm:
        sparse = Attention(shape, most_read_tokens=config.integer("index_topk"))
        packed = Indexer(config.integer("index_n_heads"), 2 * config.integer("index_head_dim") + 1)
        indexed = sparse._replace(indexer=packed)
        full = [indexed if has else sparse for has in has_indexer(config, model_type, num_layers)]
    made: dict[int, tuple[Mixer, ...]] = {id(each): (each,) for each in full}
    delta: tuple[Mixer, ...] = (delta_attention(config, shape.hidden_size or 0),)
    kinds = layer_types(config, num_layers, "indexed_attention", interval="layer_group_size")
    mixers = [delta if kind == "linear_attention" else made[id(full[number])] for number, kind in enumerate(kinds)]
    return config.model(
        model_type, mixers, attention=shape, positions=("max_position_embeddings", "model_max_length")
    )  # fmt: skip
