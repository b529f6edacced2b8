"""Gemma 4 and Gemma 3n: most layers have a window, and the last layers read an earlier layer's cache.

In Gemma 4, the layers that attend to all tokens have wider heads, and in the larger models fewer KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcalc.errors import ModelError
from kvcalc.model.families.common import decoder_body
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Weight, experts, gated_mlp, linear, lookup, norm, other, router
from kvcalc.model.type_tables import defaults_of

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_DIFFUSION = "diffusion_gemma_text"
_PATTERN = {_DIFFUSION: 6, "gemma4_text": 6, "gemma4_unified_text": 6, "gemma3n_text": 5}


def read_gemma4_assistant(config: ConfigReader, model_type: str) -> ModelSpec:
    """Gemma 4's own drafter: a few layers that keep nothing, because they read the cache of the model.

    It joins the model's embedding and hidden state, of backbone_hidden_size each, and gives a hidden state back. Its
    output head is the embedding of its own. Source: Gemma4MTP, gemma4_mtp.py of vLLM 0.33.0.
    """
    own = {**config.shares({key: key for key in ("torch_dtype", "dtype")}), "hidden_size_per_layer_input": 0}
    text = config.nested("text_config").with_defaults(own)
    width, backbone = text.integer("hidden_size"), config.integer("backbone_hidden_size")
    more = [linear("pre_projection", 2 * backbone, width), linear("post_projection", width, backbone)]
    if config.boolean("use_ordered_embeddings", default=False):
        more.append(other("masked_embedding.centroids", config.integer("num_centroids"), width))
    spec = read(text, text.word("model_type") or "gemma4_text", more)
    return spec._replace(model_type=model_type, stated={**spec.stated, "backbone_hidden_size": backbone})


def read(config: ConfigReader, model_type: str, of_drafter: Sequence[Weight] = ()) -> ModelSpec:
    """The last num_kv_shared_layers layers keep nothing: each reads the cache of the last earlier layer of its kind.

    `of_drafter` are the other weights of a drafter, none of whose layers keeps anything.
    """
    config = config.with_defaults(defaults_of(model_type))
    if model_type == _DIFFUSION:
        own_keys = {"attention_k_eq_v": True, "enable_moe_block": config.is_set("num_experts")}
        config = config.with_defaults(own_keys)
    if config.word("use_bidirectional_attention") == "all":
        raise ModelError(
            f"{config.name}: use_bidirectional_attention: encoders, which halve the window, are not supported"
        )
    num_layers = config.num_layers("num_hidden_layers")
    kinds = _layer_types(config, model_type, num_layers)
    config = _with_full_layers(config, kinds)
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim")
    num_kv_heads = config.check_groups(num_heads, config.integer("num_key_value_heads"))
    bias = config.boolean("attention_bias", default=False)
    shape = AttentionShape(
        num_heads, num_kv_heads, head_dim, head_dim, config.optional_integer("hidden_size"), qkv_bias=bias,
        output_bias=bias, rope_dim=head_dim, rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip
    plain = {
        "sliding_attention": Attention(shape, config.integer("sliding_window"), names=Projections(qk_norm="head")),
        "full_attention": _full(config, model_type, shape),
    }
    own = 0 if of_drafter else num_layers - config.integer("num_kv_shared_layers", least=0, most=num_layers)
    if set(kinds[:own]) != set(kinds) and not of_drafter:
        raise ModelError(f"{config.name}: num_kv_shared_layers leaves no layer of the same kind to share a cache with")
    keeping = {kind: (mixer,) for kind, mixer in plain.items()}
    # A layer that reads an earlier layer's cache has no key and value projections.
    sharing = {
        kind: (mixer._replace(keeps=False, names=mixer.names._replace(has_key=False, has_value=False)),)
        for kind, mixer in plain.items()
    }
    mixers = [(sharing if number >= own else keeping)[kind] for number, kind in enumerate(kinds)]
    return config.model(
        model_type, mixers, lambda: _body(config, model_type, num_layers, own, of_drafter), attention=shape
    )  # fmt: skip


def _with_full_layers(config: ConfigReader, kinds: list[str]) -> ConfigReader:
    """Return the config with the keys of the published ones, if Transformers has saved it.

    Transformers saves what differs in the layers that attend to all tokens in per_layer_config, and then reads neither
    global_head_dim nor num_global_key_value_heads. Source: Gemma4TextConfig, Transformers 5.23.0.
    """
    stated = config.per_layer(len(kinds))
    if stated is None:
        return config
    full = [layer for layer, kind in zip(stated, kinds) if kind == "full_attention"]
    rest = [layer for layer, kind in zip(stated, kinds) if kind != "full_attention"]
    if any(layer != full[0] for layer in full) or any(rest) or not {*full[0]} <= {"head_dim", "num_key_value_heads"}:
        raise config.error("per_layer_config: only the heads of the full_attention layers may differ")
    own: dict[str, object] = {"global_head_dim": config.integer("head_dim")}
    for key, stated_once in (("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")):
        if key in full[0]:
            own[stated_once] = full[0][key]
    return config.without("global_head_dim").with_defaults(own)


def _full(config: ConfigReader, model_type: str, shape: AttentionShape) -> Attention:
    """Return a layer that attends to all tokens.

    num_global_key_value_heads applies only with attention_k_eq_v, in which case keys also serve as values.
    """
    names = Projections(qk_norm="head")
    if model_type == "gemma3n_text":
        return Attention(shape, names=names)
    keys_are_values = config.boolean("attention_k_eq_v", default=False)
    heads = (config.optional_integer("num_global_key_value_heads") if keys_are_values else None) or shape.num_kv_heads
    width = config.integer("global_head_dim")
    wide = shape._replace(
        num_kv_heads=config.check_groups(shape.num_heads, heads), qk_head_dim=width, v_head_dim=width, rope_dim=width
    )
    return Attention(wide, names=names._replace(has_value=not keys_are_values))


def _body(config: ConfigReader, model_type: str, num_layers: int, own: int, of_drafter: Sequence[Weight]) -> Body:
    """An MLP (and experts), and the weights for per-layer inputs.

    DiffusionGemma also has an MLP that reads the last step's output. Source: Gemma4TextDecoderLayer,
    Gemma3nTextDecoderLayer and DiffusionGemmaSelfConditioning, Transformers 5.23.0.
    """
    width = config.integer("hidden_size")
    extra: tuple[Weight, ...] = ()
    if config.boolean("enable_moe_block", default=False):
        extra += _experts(config, width)
    outer: list[Weight] = [*of_drafter]
    per_layer = config.optional_integer("hidden_size_per_layer_input", least=0)
    if per_layer:
        extra += (
            linear("per_layer_input_gate", width, per_layer),
            linear("per_layer_projection", per_layer, width),
            norm("post_per_layer_input_norm", width),
        )
        inputs = num_layers * per_layer
        outer += [
            lookup("model.embed_tokens_per_layer", config.integer("vocab_size_per_layer_input"), inputs),
            linear("model.per_layer_model_projection", width, inputs),
            norm("model.per_layer_projection_norm", per_layer),
        ]
    if model_type == _DIFFUSION:
        name = "model.self_conditioning"
        outer += [norm(f"{name}.pre_norm", width), *gated_mlp(name, width, config.integer("intermediate_size"))]
    if model_type == "gemma3n_text":
        count = config.integer("altup_num_inputs")
        extra += _altup(config, width, count)
        names = ("altup_projections", "altup_unembed_projections")
        projections = [linear(f"model.{name}.0", width, width) for name in names]
        outer += experts(projections, count - 1, count - 1)
    made = {inner: (*gated_mlp("mlp", width, inner), *extra) for inner in set(_widths(config, num_layers, own))}
    return decoder_body(
        config, [made[inner] for inner in _widths(config, num_layers, own)], *outer, norms=_NORMS, tied=True
    )


def _widths(config: ConfigReader, num_layers: int, own: int) -> list[int]:
    """Return the MLP width of every layer.

    The config gives one width for all layers or one per layer (Gemma 3n). In Gemma 4, layers that share keys and values
    may have twice the width.
    """
    if config.is_list("intermediate_size"):
        listed = config.integers("intermediate_size", least=1)
        if len(listed) != num_layers:
            raise config.error(f"intermediate_size must give a width for each of {num_layers} layers")
        return listed
    inner = config.integer("intermediate_size")
    doubled = 2 if config.boolean("use_double_wide_mlp", default=False) else 1
    return [inner] * own + [doubled * inner] * (num_layers - own)


def _experts(config: ConfigReader, width: int) -> tuple[Weight, ...]:
    """The experts of Gemma 4 26B-A4B, in addition to the MLP."""
    count, inner = config.integer("num_experts"), config.integer("moe_intermediate_size")
    return (
        router("router.proj", width, count),
        other("router.scale", width),
        other("router.per_expert_scale", count),
        *experts(gated_mlp("experts.0", width, inner), count, config.integer("top_k_experts", most=count)),
        norm("post_feedforward_layernorm_1", width),
        norm("post_feedforward_layernorm_2", width),
        norm("pre_feedforward_layernorm_2", width),
    )


def _altup(config: ConfigReader, width: int, inputs: int) -> tuple[Weight, ...]:
    """The alternating updates and the low-rank residual of Gemma 3n.

    Source: Gemma3nTextAltUp and Gemma3nTextLaurelBlock.
    """
    rank = config.integer("laurel_rank")
    return (
        other("altup.correct_output_scale", width),
        linear("altup.correction_coefs", inputs, inputs),
        linear("altup.prediction_coefs", inputs, inputs * inputs),
        router("altup.modality_router", width, inputs),
        norm("altup.router_norm", width),
        linear("laurel.linear_left", width, rank),
        linear("laurel.linear_right", rank, width),
        norm("laurel.post_laurel_norm", width),
    )


def _layer_types(config: ConfigReader, model_type: str, num_layers: int) -> list[str]:
    """Return the config's list, else the family's pattern. The last layer of Gemma 4 never has a window.

    mlx-lm's configs may state the pattern's step in sliding_window_pattern.
    """
    kinds = config.strings("layer_types", num_layers, ("full_attention", "sliding_attention"))
    pattern = config.optional_integer("sliding_window_pattern") or _PATTERN[model_type]
    if kinds is None:
        kinds = ["sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(num_layers)]
    return [*kinds[:-1], "full_attention"] if model_type != "gemma3n_text" else kinds
