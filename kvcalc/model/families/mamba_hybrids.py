"""Mamba, Falcon-Mamba and Mamba-2; Mamba and attention: Jamba, Bamba, Granite 4, Falcon-H1, Zamba and Zamba2."""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.errors import ModelError
from kvcalc.model.experts import Experts, choose, moe, with_defaults
from kvcalc.model.families.common import decoder_body, grouped_shape
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.mixers.recurrent import Recurrence, mamba, mamba2
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, gated_mlp, linear
from kvcalc.model.type_tables import defaults_of


def read_mamba(config: ConfigReader, model_type: str) -> ModelSpec:
    """Every layer has the same mixer and a state, and there is no attention.

    The inner width of Mamba is intermediate_size if the config states it. Source: MambaMixer and Mamba2Mixer,
    Transformers 5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    config.refuse("ssm_cfg", "this is a config of the original repository; use the one converted for Transformers")
    state, kernel = config.integer("state_size"), config.integer("conv_kernel")
    hidden_size = config.integer("hidden_size")
    bias, conv_bias = config.boolean("use_bias", default=False), config.boolean("use_conv_bias", default=True)
    if model_type == "mamba2":
        inner = mamba2_inner(config, expanded(config, "expand"), "num_heads", "head_dim")
        heads, groups = config.integer("num_heads"), config.integer("n_groups")
        mixer = mamba2(inner, heads, groups, state, kernel, hidden_size, "mixer", bias=bias, conv_bias=conv_bias)
    else:
        inner = config.optional_integer("intermediate_size") or expanded(config, "expand")
        rank = time_step_rank(config, "time_step_rank")
        mixer = mamba(inner, state, kernel, hidden_size, rank, "mixer", bias=bias, conv_bias=conv_bias)
    num_layers = config.num_layers("num_hidden_layers", "n_layer")

    def body() -> Body:
        return decoder_body(
            config, (), norms=("norm",), last="backbone.norm_f", tied=model_type != "mamba2",
            embedding="backbone.embeddings", prefix="backbone.layers.{}.",
        )  # fmt: skip

    return config.model(model_type, [(mixer,)] * num_layers, body, positions=())


def mamba2_inner(config: ConfigReader, inner: int, heads_key: str, head_dim_key: str) -> int:
    """Return `inner`. Raises ModelError if it is not heads x head_dim.

    If head_dim is "auto" or missing, it is computed from the inner width.
    """
    heads = config.integer(heads_key)
    head_dim = inner // heads if config.is_any(head_dim_key, None, "auto") else config.integer(head_dim_key)
    if heads * head_dim != inner:
        raise ModelError(
            f"{config.name}: {heads_key} {heads} x {head_dim_key} {head_dim} is not the inner width {inner}"
        )
    return inner


def expanded(config: ConfigReader, key: str) -> int:
    """Return the inner width, hidden_size times the factor under `key`, which must be an integer."""
    inner = config.number(key, default=2.0) * config.integer("hidden_size")
    if inner != int(inner):
        raise ModelError(f"{config.name}: {key} x hidden_size is {inner}: must be an integer")
    return int(inner)


def time_step_rank(config: ConfigReader, key: str) -> int:
    """Return the rank of the time-step projection. If it is "auto" or missing: hidden_size / 16, rounded up."""
    if config.is_any(key, None, "auto"):
        return -(-config.integer("hidden_size") // 16)
    return config.integer(key)


_EXPERTS = {
    "jamba": Experts("num_experts", "intermediate_size", prefix="feed_forward", router="router"),
    "granitemoehybrid": Experts(inner="intermediate_size", prefix="block_sparse_moe", router="router"),
}
_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def read_mamba_hybrids(config: ConfigReader, model_type: str) -> ModelSpec:
    """Mamba and attention: in separate layers in Jamba, Bamba and Granite 4, in the same layer in Falcon-H1.

    Mamba layers (Mamba-2, or Mamba in Jamba) keep a state. Attention layers keep K and V."""
    config = with_defaults(config, defaults_of(model_type))
    config.refuse("sliding_window", "windows are not supported for this family")
    num_layers = config.num_layers("num_hidden_layers")
    shape = grouped_shape(config)
    if model_type == "jamba":
        shape = shape._replace(qkv_bias=False, output_bias=False)
    attention, mixer = Attention(shape), _mixer(config, model_type, shape.hidden_size or 0)
    mixers: list[tuple[Mixer, ...]]
    if model_type == "falcon_h1":
        mixers = [(attention, mixer)] * num_layers
    else:
        by_kind: tuple[tuple[Mixer, ...], tuple[Mixer, ...]] = ((mixer,), (attention,))
        mixers = [by_kind[attends] for attends in _attention_layers(config, model_type, num_layers)]
    return config.model(model_type, mixers, lambda: _body(config, model_type, num_layers), attention=shape)


def _mixer(config: ConfigReader, model_type: str, width: int) -> Recurrence:
    bias, conv_bias = config.boolean("mamba_proj_bias", default=False), config.boolean("mamba_conv_bias", default=True)
    state, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    if model_type == "jamba":
        inner, rank = expanded(config, "mamba_expand"), time_step_rank(config, "mamba_dt_rank")
        return mamba(inner, state, kernel, width, rank, "mamba", bias=bias, conv_bias=conv_bias, has_norms=True)
    stated, output_bias, has_norm = None, bias, True
    if model_type == "falcon_h1":
        stated = config.optional_integer("mamba_d_ssm")
        output_bias = config.boolean("projectors_bias", default=False)
        has_norm = config.boolean("mamba_rms_norm", default=False)
    inner = mamba2_inner(config, stated or expanded(config, "mamba_expand"), "mamba_n_heads", "mamba_d_head")
    return mamba2(
        inner, config.integer("mamba_n_heads"), config.integer("mamba_n_groups"), state, kernel, width, "mamba",
        bias=bias, conv_bias=conv_bias, output_bias=output_bias, has_norm=has_norm,
    )  # fmt: skip


def _body(config: ConfigReader, model_type: str, num_layers: int) -> Body:
    """Every layer has an MLP, experts or both.

    Source: JambaAttentionDecoderLayer, BambaDecoderLayer, GraniteMoeHybridDecoderLayer and FalconH1DecoderLayer,
    Transformers 5.23.0.
    """
    width, is_granite = config.integer("hidden_size"), model_type == "granitemoehybrid"
    names = ("input_layernorm", "post_attention_layernorm" if is_granite else "pre_ff_layernorm")
    last = "model.norm" if is_granite else "model.final_layernorm"
    return decoder_body(config, _feed_forward(config, model_type, width, num_layers), norms=names, last=last)


def _feed_forward(config: ConfigReader, model_type: str, width: int, num_layers: int) -> list[tuple[Weight, ...]]:
    if model_type == "granitemoehybrid":
        # Every layer has the shared MLP, and experts too if the model has any.
        shared = config.integer("shared_intermediate_size")
        layer: tuple[Weight, ...] = (
            linear("shared_mlp.input_linear", width, 2 * shared),
            linear("shared_mlp.output_linear", shared, width),
        )
        if config.integer("num_local_experts", "num_experts", least=0):
            layer += moe(config, _EXPERTS[model_type], width)
        return [layer] * num_layers
    bias = model_type != "jamba" and config.boolean("mlp_bias", default=False)
    dense = gated_mlp("feed_forward", width, config.integer("intermediate_size"), bias)
    if model_type != "jamba":
        return [dense] * num_layers
    period = config.integer("expert_layer_period")
    offset = config.integer("expert_layer_offset", least=0, most=period - 1)
    has_experts = config.integer("num_experts", "num_local_experts") > 1
    sparse: Collection[int] = range(offset, num_layers, period) if has_experts else ()
    return choose(num_layers, sparse, moe(config, _EXPERTS[model_type], width) if has_experts else (), dense)


def _attention_layers(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    """Return for each layer whether it is an attention layer.

    Jamba states a period and an offset, Bamba lists the numbers of the layers, and Granite lists their kinds.
    """
    if model_type == "jamba":
        period = config.integer("attn_layer_period")
        offset = config.integer("attn_layer_offset", least=0, most=period - 1)
        return [number % period == offset for number in range(num_layers)]
    if model_type == "bamba":
        listed = config.integers("attn_layer_indices", most=num_layers - 1)
        return [number in listed for number in range(num_layers)]
    kinds = config.strings("layer_types", num_layers, (*_NAMES, *_NAMES.values()))
    return [_NAMES.get(kind, kind) == "full_attention" for kind in kinds or ["mamba"] * num_layers]


# The default order of Zamba2's 54 layers if the config does not list them.
_ZAMBA2 = "M" + "MMMMMH" * 7 + "MMMMH" + "MMMH" + "MM"
_KINDS = ("mamba", "linear_attention", "hybrid")


def read_zamba(config: ConfigReader, model_type: str) -> ModelSpec:
    """Zamba and Zamba2: Mamba in every layer.

    Some layers first call a shared attention block, whose input is twice as wide as the model.

    A hybrid layer keeps K and V of its call of the shared block and a Mamba state. Other layers keep only the state.

    Every call of the shared block has its own cache. Source: ZambaHybridLayer and Zamba2HybridLayer, Transformers
    5.23.0.
    """
    config = config.with_defaults(defaults_of(model_type))
    num_layers = config.num_layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    width = config.optional_integer("attention_head_dim") or 2 * config.integer("hidden_size") // num_heads
    shape = grouped_shape(config.without("head_dim"), head_dim=width, rotary=model_type == "zamba2")
    inner, hidden_size = expanded(config, "mamba_expand"), config.integer("hidden_size")
    state_size, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    if model_type == "zamba":
        rank = time_step_rank(config, "mamba_dt_rank")
        mixer = mamba(inner, state_size, kernel, hidden_size, rank, "mamba")
    else:
        inner = mamba2_inner(config, inner, "n_mamba_heads", "mamba_headdim")
        heads, groups = config.integer("n_mamba_heads"), config.integer("mamba_ngroups")
        mixer = mamba2(inner, heads, groups, state_size, kernel, hidden_size, "mamba")
    state_only: tuple[Mixer, ...] = (mixer,)
    both: tuple[Mixer, ...] = (Attention(shape), mixer)
    hybrid = _hybrid_layers(config, model_type, num_layers)
    return config.model(model_type, [both if is_hybrid else state_only for is_hybrid in hybrid], attention=shape)


def _hybrid_layers(config: ConfigReader, model_type: str, num_layers: int) -> list[bool]:
    kinds = config.strings("layers_block_type", num_layers, _KINDS)
    if kinds is None:
        kinds = config.strings("layer_types", num_layers, _KINDS)
    if kinds is not None:
        return [kind == "hybrid" for kind in kinds]
    if model_type == "zamba2":
        if num_layers != len(_ZAMBA2):
            raise config.error("layers_block_type is missing: there is a default only for Zamba2-2.7B with 54 layers")
        return [letter == "H" for letter in _ZAMBA2]
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    return [False, False, True, *(number % period == offset for number in range(num_layers - 3))][:num_layers]
