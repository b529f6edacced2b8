"""MiMo-V2 and MiMo-V2-Flash: most layers have a window and another number of KV heads. Keys are wider than values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe, with_defaults
from kvcalc.model.families.common import decoder_body
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp
from kvcalc.model.type_tables import defaults_of

_SINKS = Projections(has_sinks=True)


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Layers with 1 in hybrid_layer_pattern have a window: sliding_window_size earlier tokens and the current one.

    Without that key, the first layer and every sixth layer have no window, and without swa_num_key_value_heads the
    layers with a window have twice as many KV heads as the others. attention_chunk_size repeats the size of the window;
    there are no chunks. Source: MiMoV2FlashConfig, Transformers 5.23.0, and the swa_ keys of the published config.
    """
    config = with_defaults(config, defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    num_heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    v_head_dim = config.integer("v_head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    earlier = config.optional_integer("sliding_window_size")
    window = config.integer("sliding_window") if earlier is None else earlier + 1
    bias, width = config.boolean("attention_bias", default=False), config.integer("hidden_size")
    # The output projection never has a bias (MiMoV2FlashAttention).
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, v_head_dim, width, qkv_bias=bias, rope_dim=head_dim,
        rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    full = (Attention(shape),)
    windowed = (Attention(_window_shape(config, shape), window, names=_SINKS),)

    def body() -> Body:
        config.refuse("n_shared_experts", "shared experts are not supported for this family")
        dense = gated_mlp("mlp", width, config.integer("intermediate_size"))
        sparse = moe(config, Experts("n_routed_experts"), width)
        return decoder_body(config, choose(num_layers, _sparse_layers(config, num_layers), sparse, dense))

    mixers = [windowed if slides else full for slides in _sliding_layers(config, num_layers)]
    return config.model(model_type, mixers, body, attention=shape)


def _window_shape(config: ConfigReader, shape: AttentionShape) -> AttentionShape:
    """Return the shape of a layer with a window. In MiMo-V2-Flash, only the number of KV heads differs."""
    heads = config.optional_integer("swa_num_attention_heads") or shape.num_heads
    kv_heads = config.optional_integer("swa_num_key_value_heads") or 2 * shape.num_kv_heads
    width = config.optional_integer("swa_head_dim") or shape.qk_head_dim
    return shape._replace(
        num_heads=heads, num_kv_heads=config.check_groups(heads, kv_heads), qk_head_dim=width, rope_dim=width,
        v_head_dim=config.optional_integer("swa_v_head_dim") or shape.v_head_dim,
    )  # fmt: skip


def _sparse_layers(config: ConfigReader, num_layers: int) -> Collection[int]:
    """Return the layers with experts.

    The published config states them in moe_layer_freq and Transformers' config in mlp_layer_types. By default all
    layers except the first have experts.
    """
    default: Collection[int] = range(1, num_layers)
    if not config.has("mlp_layer_types") and config.has("moe_layer_freq"):
        default = [number for number, has in enumerate(config.flags("moe_layer_freq", num_layers)) if has]
    return listed_sparse_layers(config, num_layers, default)


def _sliding_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return for each layer whether it has the window. By default the first and every sixth layer have none."""
    stated = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if stated is not None:
        return [kind == "sliding_attention" for kind in stated]
    if not config.has("hybrid_layer_pattern"):
        return [number > 0 and (number + 1) % 6 != 0 for number in range(num_layers)]
    return config.flags("hybrid_layer_pattern", num_layers)


def as_transformers(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config without the keys that Transformers' class ignores.

    It has full attention in the first and in every sixth layer, and twice as many KV heads in the others, like the
    published model. Source: MiMoV2FlashConfig and MiMoV2FlashAttention, Transformers 5.23.0.
    """
    ignored = (
        "hybrid_layer_pattern",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_head_dim",
        "swa_v_head_dim",
    )
    return {key: value for key, value in config.items() if key not in ignored}
