"""Inkling and ZAYA: attention whose queries, keys or values pass short convolutions, which keep their last inputs."""

from __future__ import annotations

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import Experts, choose, listed_sparse_layers, moe
from kvcalc.model.families.common import decoder_body
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import MAX_LAYERS, Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import gated_mlp, linear, norm, other
from kvcalc.model.type_tables import defaults_of

_WINDOW = {"inkling_text": 512, "inkling2_text": 1024, "inkling2_loop_text": 1024}
_KINDS = ("hybrid", "hybrid_sliding")


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """A layer keeps K and V, of all tokens or of a window, and the inputs of its convolutions."""
    config = config.with_defaults(defaults_of(model_type))
    return _read_zaya(config) if model_type == "zaya" else _read_inkling(config, model_type)


def _read_inkling(config: ConfigReader, model_type: str) -> ModelSpec:
    """Five of six layers have a window, with heads of their own.

    There are four convolutions per layer, in fp32: over keys, over values, and over the outputs of attention and of the
    MLP. Queries also give d_rel numbers per head, which weigh a table of distances up to rel_extent, or up to the
    window. Source: InklingAttention, InklingDecoderLayer and Inkling2SlidingDecoderLayer, Transformers 5.23.0.
    """
    num_layers, width = config.num_layers("num_hidden_layers"), config.integer("hidden_size")
    kernel = config.optional_integer("conv_kernel_size", "sconv_kernel_size") or 4
    window = config.optional_integer("sliding_window_size", "sliding_window") or _WINDOW[model_type]

    def layer(prefix: str, window: int | None) -> tuple[Mixer, ...]:
        heads, head_dim = config.integer(f"{prefix}num_attention_heads"), config.integer(f"{prefix}head_dim")
        kv_heads = config.check_groups(heads, config.integer(f"{prefix}num_key_value_heads"))
        shape = AttentionShape(heads, kv_heads, head_dim, head_dim, width)
        channels = 2 * kv_heads * head_dim + 2 * width
        convolved = RecurrentState(channels, kernel, 0, conv_dtype="fp32")
        distances = config.integer("rel_extent")
        rank = config.integer("d_rel")
        weights = (
            linear("self_attn.r_proj", width, heads * rank),
            other("self_attn.rel_logits_proj", rank, min(window or distances, distances)),
            other("sconv", channels, kernel),
        )
        names = Projections(qk_norm="head")
        return (Attention(shape, window, names=names), Recurrence(convolved, "none", weights=weights))

    full, windowed = layer("", None), layer("swa_", window)
    kinds = config.strings("layer_types", num_layers, _KINDS)
    if kinds is not None:
        slides = [kind == "hybrid_sliding" for kind in kinds]
    elif model_type == "inkling_text" and config.has("local_layer_ids"):
        local = config.integers("local_layer_ids", most=num_layers - 1)
        slides = [number in local for number in range(num_layers)]
    else:
        slides = [(number + 1) % 6 != 0 for number in range(num_layers)]
    if model_type == "inkling2_loop_text":
        slides = _looped(config, slides)
    return config.model(
        model_type, [windowed if is_windowed else full for is_windowed in slides],
        None if model_type != "inkling_text" else lambda: _body_of_inkling(config, num_layers),
        attention=full[0].shape if isinstance(full[0], Attention) else None,
        positions=("max_position_embeddings", "model_max_length"),
    )  # fmt: skip


def _looped(config: ConfigReader, slides: list[bool]) -> list[bool]:
    """The layers with those that run several times, each time with a cache of its own.

    Published configs have the keys of loop_config. Source: Inkling2LoopTextConfig, Transformers 5.24.0.
    """
    stated = config.nested("loop_config").shares(
        {"core_start": "loop_layer_index_start", "core_end": "loop_layer_index_end", "num_passes": "loop_num_passes"}
    )
    config = config.with_values(stated).with_defaults(defaults_of("inkling2_loop_text"))
    first, end = config.integer("loop_layer_index_start"), config.integer("loop_layer_index_end", most=len(slides))
    return [*slides, *slides[first:end] * (config.integer("loop_num_passes", most=MAX_LAYERS) - 1)]


def _body_of_inkling(config: ConfigReader, num_layers: int) -> Body:
    """The router also scores the shared experts.

    In checkpoints with dense_intermediate_size, intermediate_size is the width of an expert. Source: InklingTextConfig,
    InklingMoE and InklingForCausalLM, Transformers 5.23.0.
    """
    width = config.integer("hidden_size")
    wide = config.optional_integer("dense_intermediate_size")
    inner = config.integer("intermediate_size" if wide else "moe_intermediate_size")
    shared = config.integer("n_shared_experts", least=0)
    sized = config.with_values({"moe_intermediate_size": inner, "n_shared_experts": shared})
    rule = Experts("n_routed_experts", shared=True)
    sparse = (*moe(sized, rule, width), other("mlp.gate.of_shared_experts", shared, width), other("mlp.gate.scale", 1))
    first = config.optional_integer("dense_mlp_idx", least=0) or 0
    layers = listed_sparse_layers(config, num_layers, range(min(first, num_layers), num_layers))
    dense = (*gated_mlp("mlp", width, wide or config.integer("intermediate_size")), other("mlp.scale", 1))
    return decoder_body(config, choose(num_layers, layers, sparse, dense), norm("model.embed_norm", width))


def _read_zaya(config: ConfigReader) -> ModelSpec:
    """Two convolutions in turn over queries and keys, and one half of each value, which comes one token late.

    The state has the inputs of both convolutions before the current one, and that half of the last token's values.
    Source: ZayaAttention, Transformers 5.23.0.
    """
    num_layers, width = config.num_layers("num_hidden_layers"), config.integer("hidden_size")
    heads, head_dim = config.integer("num_attention_heads"), config.integer("head_dim")
    kv_heads = config.check_groups(heads, config.integer("num_key_value_heads"))
    shape = AttentionShape(heads, kv_heads, head_dim, head_dim, width)
    kernel = config.integer("cca_time0") + config.integer("cca_time1") - 1
    state = RecurrentState((heads + kv_heads) * head_dim, kernel, kv_heads * head_dim // 2, state_dtype=None)
    kinds = config.strings("layer_types", num_layers, _KINDS) or ["hybrid"] * num_layers
    window = config.integer("sliding_window") if "hybrid_sliding" in kinds else None
    full: tuple[Mixer, ...] = (Attention(shape), Recurrence(state, "none"))
    windowed: tuple[Mixer, ...] = (Attention(shape, window), Recurrence(state, "none"))
    mixers = [windowed if kind == "hybrid_sliding" else full for kind in kinds]
    return config.model("zaya", mixers, attention=shape)
