"""Kimi Linear and Kimi K3: Kimi delta attention, and MLA in every fourth layer."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body, latent_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp, linear, norm, other

KEYS = frozenset(
    (
        "num_key_value_heads head_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim "
        "v_head_dim linear_attn_config linear_head_dim linear_num_heads linear_conv_kernel_dim layer_types "
        "mlp_layer_types activation_situ_linear_beta"
    ).split()
)

# Source: KimiLinearConfig, Transformers 5.23.0.
_DEFAULTS = {
    "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "vocab_size": 163840,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_local_experts": 256,
}  # fmt: skip
# Keys of Kimi K3 that add matrices which Transformers 5.23.0 does not build.
_NOT_BUILT = ("routed_expert_hidden_size", "mla_use_output_gate", "attn_res_block_size", "latent_moe_use_norm")
_NESTED = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
           "short_conv_kernel_size": "linear_conv_kernel_dim"}  # fmt: skip


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Layers with full attention keep a latent and a rotary key.

    The other layers keep a state of head_dim x head_dim per head, in fp32, and the inputs of convolutions over queries,
    keys and values. Source: KimiLinearDeltaAttention, Transformers 5.23.0.
    """
    nested = config.nested("linear_attn_config")
    config = with_defaults(config, {**_DEFAULTS, **stated_delta_attention(config)})
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
    nested = config.nested("linear_attn_config").config
    return {flat: nested[key] for key, flat in _NESTED.items() if key in nested}


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
    if nested.config.get("use_full_rank_gate"):
        raise config.error("linear_attn_config.use_full_rank_gate: the weights that it adds are not counted")
    if config.config.get("moe_layer_freq") not in (None, 1):
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
    if "full_attn_layers" not in nested.config or "kda_layers" not in nested.config:
        raise config.error("layer_types is missing, and so are full_attn_layers or kda_layers in linear_attn_config")
    full, delta = (nested.integers(key, least=1, most=num_layers) for key in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        raise config.error(f"full_attn_layers and kda_layers must list each of {num_layers} layers once")
    return [number in full for number in range(1, num_layers + 1)]
