"""Read decoders with K and V in every layer: without windows, with a window in all layers, or in some layers.

The differences between these families are in `decoder_table`, one row per family.
"""

from __future__ import annotations

from kvcalc.model.experts import choose, moe, sparse_layers, with_defaults
from kvcalc.model.families.decoder_table import Decoder, row
from kvcalc.model.mixers.attention import Attention, AttentionShape, Projections
from kvcalc.model.reader import Body, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Around, Weight, around, gated_mlp, linear, lookup, norm, other, plain_mlp

# Keys that some of these families support. In the other families they may change the cache.
_OWN_KEYS = frozenset(
    (
        "sliding_window_pattern _sliding_window_pattern prefix_dense_sliding_window_pattern use_sliding_window "
        "max_window_layers keep_window_size compression_ratio global_attn_every_n_layers attention_head_dim"
    ).split()
)

_KEYS = _OWN_KEYS | frozenset(
    (
        "num_key_value_heads head_dim v_head_dim sliding_window sliding_window_size sliding_window_attention_size "
        "global_local_attention_pattern layer_types decoder_sparse_step "
        "mlp_layer_types moe_layer_types mtp_layer_types mtp_mlp_layer_types prefix_dense_intermediate_size"
    ).split()
)

# The third name, and a pattern of SLIDING_LOCAL and GLOBAL, are in the configs that ExecuTorch has for MediaTek.
_WINDOW_KEYS = ("sliding_window", "sliding_window_size", "sliding_window_attention_size")
_LOCAL_PATTERN = "global_local_attention_pattern"
_LAYER_TYPES = ("full_attention", "sliding_attention")


def known_keys(model_type: str) -> frozenset[str]:
    """Return the keys that a config of this type may have, besides the common ones."""
    return Decoder(row(model_type)).keys or _KEYS


def read(config: ConfigReader, model_type: str) -> ModelSpec:
    """Read a decoder by its row: K and V of num_key_value_heads heads in every layer, for all tokens or a window."""
    facts = row(model_type)
    if "computed" in facts:
        # Only a few rows need these modules.
        from kvcalc.model.families.layer_functions import FUNCTIONS
        from kvcalc.model.families.layer_row import Row
        from kvcalc.model.families.layered import CALLED

        known = Row({}, config, {**FUNCTIONS, **facts}, CALLED)
        facts = {**facts, **{field: known.value(formula) for field, formula in facts["computed"].items()}}
    decoder = Decoder(facts)
    defaults = decoder.defaults
    if any(config.has(key) for key in _WINDOW_KEYS[1:]):
        defaults = {key: value for key, value in defaults.items() if key not in _WINDOW_KEYS}
    config = with_defaults(config, defaults)
    for key, why in decoder.refused.items():
        config.refuse(key, why)
    for key in decoder.foreign_keys if decoder.keys else _foreign_keys(config, decoder, model_type):
        config.refuse(key, f"may change the cache, and kvcalc does not know it for {model_type}")
    num_layers = config.num_layers(*decoder.layers)
    shape = _shape(config, decoder)
    sliding = _sliding_layers(config, decoder, num_layers)
    window = config.integer(*_WINDOW_KEYS) if any(sliding) else None
    is_encoder = bool(decoder.encoder_key) and config.boolean(decoder.encoder_key, default=False)
    if is_encoder and window is not None:
        window = window // 2 + 1
    has_norm = decoder.qk_norm and (not decoder.qk_norm_key or config.boolean(decoder.qk_norm_key, default=False))
    names = Projections(**decoder.attention_names, qk_norm=decoder.qk_norm if has_norm else "")
    made: dict[tuple[int, bool], tuple[Attention, ...]] = {}
    mixers = []
    for heads, is_sliding in zip(_heads_by_layer(config, decoder, shape, num_layers), sliding):
        attention = Attention(shape._replace(num_heads=heads), window if is_sliding else None, names=names)
        mixers.append(made.setdefault((heads, is_sliding), (attention,)))
    return config.model(
        model_type,
        mixers,
        None if decoder.vocab_size is None else lambda: _body(config, decoder, num_layers),
        attention=shape,
        positions=decoder.positions,
        is_encoder=is_encoder,
    )


def _heads_by_layer(config: ConfigReader, row: Decoder, shape: AttentionShape, num_layers: int) -> list[int]:
    stated = config.integers(row.heads_by_layer, least=1) if row.heads_by_layer else []
    if len(stated) not in (0, num_layers):
        raise config.error(f"{row.heads_by_layer} must have one number for each of {num_layers} layers")
    for heads in {*stated}:
        config.check_groups(heads, shape.num_kv_heads)
    return stated or [shape.num_heads] * num_layers


def _has_gate(config: ConfigReader, row: Decoder, *values: object) -> bool:
    """Return whether the key for the output's gate has one of `values`. Source: LagunaAttention, vLLM 0.33.0."""
    if not row.gate_key:
        return row.output_gate
    if not config.is_any(row.gate_key, None, True, False, "none", "per-head", "per-element"):
        raise config.error(f"{row.gate_key} must be true, false, per-head or per-element")
    return config.is_any(row.gate_key, *values)


def _shape(config: ConfigReader, row: Decoder) -> AttentionShape:
    num_heads, hidden_size = config.integer(*row.heads), config.optional_integer(*row.hidden)
    head_dim = _head_dim(config, row, hidden_size, num_heads)
    # Positions are rotary, except for models that are known only from a paper and use other positions.
    rotary = row.rotary and config.word("position_embedding_type") != "absolute"
    return AttentionShape(
        num_heads, _kv_heads(config, row, num_heads), head_dim, config.optional_integer("v_head_dim") or head_dim,
        hidden_size, qkv_bias=_flag(config, row.qkv_bias), output_bias=_flag(config, row.output_bias),
        output_gate=_has_gate(config, row, "per-element"),
        head_gate=bool(row.gate_key) and _has_gate(config, row, True, None, "per-head"),
        rope_dim=head_dim if rotary else 0, rope_theta=config.number("rope_theta", default=10_000.0),
    )  # fmt: skip


def _foreign_keys(config: ConfigReader, row: Decoder, model_type: str) -> list[str]:
    """Return the keys that other families support and that may change the cache in this one."""
    foreign = {*_OWN_KEYS} - {*row.own_keys}
    if not config.is_set("sliding_window") or _is_off(config, row):
        # The key says at which layer the window begins, so it has no effect without a window.
        foreign.discard("max_window_layers")
    if row.switch:
        foreign -= {"use_sliding_window", "max_window_layers"}
    if row.slides is None:
        config.refuse("sliding_window", "this family has no sliding window")
        foreign |= {*_WINDOW_KEYS[1:], _LOCAL_PATTERN}
    if not row.has_layer_types and any(kind != "full_attention" for kind in config.items("layer_types")):
        foreign.add("layer_types")
    if model_type != "generic":
        foreign.add("v_head_dim")
    return sorted(foreign)


def _kv_heads(config: ConfigReader, row: Decoder, num_heads: int) -> int:
    key = row.kv_heads_key
    stated = None
    if key:
        stated = config.integer(key) if row.states_kv_heads else config.optional_integer(key)
    kv_heads = row.num_kv_heads or num_heads
    if stated not in (None, kv_heads) and (row.num_kv_heads is not None or not row.grouped):
        raise config.error(f"{key} is {stated}, but the family's own keys give {kv_heads}")
    return config.check_groups(num_heads, kv_heads if row.num_kv_heads else stated or num_heads)


def _head_dim(config: ConfigReader, row: Decoder, hidden_size: int | None, num_heads: int) -> int:
    """Return the explicit width of a head, else hidden_size / heads, which must be an integer."""
    stated = config.optional_integer(row.head_dim_key) if row.head_dim_key else None
    if stated is None:
        if not row.head_dim_key:
            config.integer(*row.hidden)
        floors = row.floors_head_dim and hidden_size is not None
        head_dim = (hidden_size or 0) // num_heads if floors else config.head_dim(hidden_size, num_heads)
    else:
        head_dim = stated
    if config.optional_integer("attention_head_dim") not in (None, head_dim):
        raise config.error(f"attention_head_dim differs from the {head_dim} that the other keys give")
    if row.derives_head_dim and hidden_size is not None and head_dim * num_heads != hidden_size:
        raise config.error(f"{row.head_dim_key} is {head_dim}, but this family derives it from hidden_size")
    return head_dim


def _is_off(config: ConfigReader, row: Decoder) -> bool:
    """Whether use_sliding_window turns the window off.

    In a family that does not read this key, it does so if the window is no shorter than the longest context, as in the
    EAGLE heads of SpecForge: engines that ignore the key then keep as much.
    """
    if config.boolean("use_sliding_window", default=not row.switch):
        return False
    window = config.optional_integer(*_WINDOW_KEYS, least=0)
    longest = config.optional_integer("max_position_embeddings")
    return row.switch or (window is not None and longest is not None and window >= longest)


def _sliding_layers(config: ConfigReader, row: Decoder, num_layers: int) -> list[bool]:
    """Return for each layer whether it has the window: by the config's list, else by the family's pattern."""
    stated = config.strings("layer_types", num_layers, _LAYER_TYPES) if row.has_layer_types else None
    if row.slides is None or _is_off(config, row):
        return [False] * num_layers
    if not config.optional_integer(*_WINDOW_KEYS, least=0):
        if stated is not None and "sliding_attention" in stated:
            raise config.error("layer_types has sliding_attention, but there is no sliding_window")
        return [False] * num_layers
    if stated is not None:
        return [kind == "sliding_attention" for kind in stated]
    kinds = {"GLOBAL": False, "SLIDING_LOCAL": True}
    pattern = config.chosen(_LOCAL_PATTERN, kinds, f"may contain only {' and '.join(kinds)}")
    if pattern:
        return [pattern[number % len(pattern)] for number in range(num_layers)]
    config.refuse("layer_types", "contradicts sliding_window, which applies by the family's own rule")
    return row.slides(config, num_layers)


def _body(config: ConfigReader, row: Decoder, num_layers: int) -> Body:
    for key, size in row.builds.items():
        if config.integer(key) != size:
            raise config.error(f"{key}: weights are not counted, because the model's class ignores this config's sizes")
    for key, why in row.uncounted.items():
        config.refuse(key, why)
    width, vocab = config.integer(*row.hidden), config.integer(*row.vocab)
    is_parallel = bool(row.parallel_key) and config.boolean(row.parallel_key, default=False)
    norms = row.norms[:1] if is_parallel else row.norms
    if row.experts is None:
        mlps = [_mlp(config, row, width)] * num_layers
    else:
        sparse = sparse_layers(config, row.experts, num_layers)
        dense = _mlp(config, row, width) if len(sparse) < num_layers else ()
        mlps = choose(num_layers, sparse, moe(config, row.experts, width), dense)
    return Body(_around(config, row, width, vocab), mlps, tuple(norm(name, width, row.norm_bias) for name in norms))


def _around(config: ConfigReader, row: Decoder, width: int, vocab: int) -> Around:
    outer = [norm(name, width, row.norm_bias) for name in row.final_norms]
    for name, keys, default, more in row.tables:
        outer.append(lookup(name, (config.optional_integer(*keys) or default) + more, width))
    narrow = (config.optional_integer(row.narrow_key) if row.narrow_key else None) or width
    if narrow != width:
        stem = row.embedding.rpartition(".")[0]
        outer += linear(f"{stem}.project_in", narrow, width), linear(f"{stem}.project_out", width, narrow)
    tied = config.boolean("tie_word_embeddings", default=row.tied)
    head_bias = _flag(config, row.head_bias)
    if tied and head_bias:
        outer.append(other(f"{row.head}.bias", vocab))
    return around(
        vocab, narrow, tied, *outer, embedding=row.embedding, head=row.head, head_bias=head_bias, prefix=row.prefix,
        outputs=config.optional_integer(row.outputs_key) if row.outputs_key else None,
    )  # fmt: skip


def _mlp(config: ConfigReader, row: Decoder, width: int) -> tuple[Weight, ...]:
    keys = (row.dense_inner,) if row.dense_inner and config.is_set(row.dense_inner) else row.inner
    if row.inner_factor:
        inner = (config.optional_integer(*keys) if keys else None) or row.inner_factor * width
    else:
        inner = config.integer(*keys) // (1 + row.halves_inner)
    bias = _flag(config, row.mlp_bias)
    if row.mlp == "gated":
        return gated_mlp("mlp", width, inner, bias)
    if row.mlp == "fused":
        return (linear("mlp.gate_up_proj", width, 2 * inner, bias), linear("mlp.down_proj", inner, width, bias))
    slopes = ("alpha_p", "alpha_n") if row.mlp == "xielu" else ()
    return (*plain_mlp(*row.mlp_names, width, inner, bias), *(other(f"mlp.act_fn.{name}", 1) for name in slopes))


def _flag(config: ConfigReader, rule: bool | str) -> bool:
    return config.boolean(rule, default=False) if isinstance(rule, str) else rule
