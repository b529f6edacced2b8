"""The functions that the formulas of presets/types/layers.yaml may call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvcalc.model import tensors
from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import listed_sparse_layers, moe
from kvcalc.model.families.common import grouped_shape, hyper_connection, latent_shape
from kvcalc.model.families.indexers import has_indexer, indexer
from kvcalc.model.families.layer_row import Row
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape, Indexer, Projections
from kvcalc.model.mixers.recurrent import Recurrence, delta_attention, delta_net, mamba, mamba2, short_convolution
from kvcalc.model.reader import MAX_INTEGER, MAX_LAYERS, ConfigReader
from kvcalc.model.tensors import Weight, gated_mlp, linear, lookup, norm, other, plain_mlp, replicated, router, weights
from kvcalc.model.type_tables import defaults_of

# What a config says. `a|b` is a key and its other name, and `of` the path of the object that the key is in.


def integer(row: Row, key: str, *, least: int = 1, most: int = MAX_INTEGER, of: str = "") -> int:
    """The integer under a key, which must be there."""
    return row.inside(of).integer(*key.split("|"), least=least, most=most)


def optional(row: Row, key: str, default: Any = None, *, least: int = 1, most: int = MAX_INTEGER, of: str = "") -> Any:
    """The integer under a key, or the default, which may be a formula."""
    found = row.inside(of).optional_integer(*key.split("|"), least=least, most=most)
    return row.value(default) if found is None else found


def times(row: Row, key: str) -> int:
    """How often something repeats: at most the largest number of layers."""
    return row.reader.integer(key, most=MAX_LAYERS)


def number(row: Row, key: str, default: float, *, of: str = "") -> float:
    """The number under a key, or the default."""
    return row.inside(of).number(key, default)


def flag(row: Row, key: str, default: bool = False) -> bool:
    """The boolean under a key, or the default."""
    return row.reader.boolean(key, default)


def is_set(row: Row, key: str, *, of: str = "") -> bool:
    """Whether the value under a key is there and is not null, false, zero or empty."""
    return row.inside(of).is_set(key)


def integers(row: Row, key: str) -> list[int]:
    """The integers under a key, one for each layer."""
    listed = row.reader.integers(key, least=1)
    if len(listed) != row["num_layers"]:
        raise row.reader.error(f"{key} must be a list of {row['num_layers']}, one per layer")
    return listed


def equal(row: Row, one: object, other: object, text: str) -> None:
    """Refuse a config in which two values differ."""
    if one != other:
        raise row.reader.error(text)


def kinds_of(row: Row, key: str, known: str) -> None:
    """Refuse a config that lists other kinds of layers."""
    other = next((kind for kind in row.reader.items(key) if kind not in known.split()), None)
    if other is not None:
        raise row.reader.error(f"{key} contains {str(other)[:40]!r}: only {' and '.join(known.split())} is supported")


def multiple(row: Row, name: str, whole: int, key: str) -> int:
    """The number under a key, of which `whole`, which has a name, must be a multiple."""
    part = row.reader.integer(key)
    if whole % part:
        raise row.reader.error(f"{name} {whole:,} is not a multiple of {key} {part:,}")
    return part


def place(row: Row, key: str, period: int) -> int:
    """The place under a key, from 0, within a period."""
    return row.reader.integer(key, least=0, most=period - 1)


def expanded(row: Row, key: str) -> int:
    """The inner width of Mamba, hidden_size times the factor under a key, which must be an integer."""
    inner = row.reader.number(key, default=2.0) * row["hidden_size"]
    if inner != int(inner):
        raise row.reader.error(f"{key} x hidden_size is {inner}: must be an integer")
    return int(inner)


def time_step_rank(row: Row, key: str) -> int:
    """The rank of Mamba's time-step projection. If it is "auto" or missing: hidden_size / 16, rounded up."""
    return -(-row["hidden_size"] // 16) if row.reader.is_any(key, None, "auto") else row.reader.integer(key)


def product(row: Row, inner: int, heads: str, head_dim: str) -> int:
    """`inner`, which must be heads x head_dim. A head_dim that is "auto" or missing follows from it."""
    config, count = row.reader, row.reader.integer(heads)
    width = inner // count if config.is_any(head_dim, None, "auto") else config.integer(head_dim)
    if count * width != inner:
        raise config.error(f"{heads} {count} x {head_dim} {width} is not the inner width {inner}")
    return inner


def either(condition: object, one: Any, other: Any) -> Any:
    """One of two values."""
    return one if condition else other


def round_up(width: float, multiple: int) -> int:
    """The next multiple."""
    return int((width + multiple - 1) // multiple * multiple)


# Attention.


def head_width(row: Row, heads: int, hidden_size: int = 0) -> int:
    """head_dim, or the model's width divided by the heads."""
    return row.reader.head_dim(hidden_size or row["hidden_size"], heads)


def theta(row: Row, key: str = "rope_theta", default: float = 10_000.0) -> float:
    """The base of rotary positions."""
    return row.reader.number(key, default)


def grouped(
    row: Row, head_dim: int | None = None, *, rotary: bool = True, theta: float = 1e4, **own: Any
) -> AttentionShape:
    """The shape that the usual keys state, with `own` in place of what they say. `theta` is a default."""
    return grouped_shape(row.reader, head_dim=head_dim, rotary=rotary, rope_theta=theta)._replace(**own)


def latent(row: Row, v_head_dim: int | None = None, *, least_rope: int = 1, **own: Any) -> AttentionShape:
    """The shape of MLA that the usual keys state, with `own` in place of what they say."""
    return latent_shape(row.reader, least_rope=least_rope, v_head_dim=v_head_dim)._replace(**own)


def shaped(row: Row, heads: int, kv_heads: int, width: int, hidden_size: int = 0, **own: Any) -> AttentionShape:
    """The shape of attention whose keys and values are equally wide, in the model's width if `hidden_size` is 0."""
    kv_heads = row.reader.check_groups(heads, kv_heads)
    return AttentionShape(heads, kv_heads, width, own.pop("v_width", width), hidden_size or row["hidden_size"], **own)


def attention(row: Row, shape: AttentionShape | None = None, **own: Any) -> Attention:
    """Attention of the row's shape. `own` are fields of `Attention`, and of `Projections`."""
    if "qk_norms" in own:
        own["qk_norms"] = tuple(own["qk_norms"].split())
    names = Projections(**{name: own.pop(name) for name in [*own] if name in Projections._fields})
    return Attention(shape or row["shape"], names=names, **own)


def changed(shape: AttentionShape, **own: Any) -> AttentionShape:
    """A shape with other fields."""
    return shape._replace(**own)


def latent_indexer(row: Row, head_dim: int = 0, more: tuple[Weight, ...] = ()) -> Indexer:
    """The indexer of MLA. Its keys may be wider than its queries, and it may have more weights."""
    own = indexer(row.reader, row["shape"])
    return Indexer(own.num_heads, head_dim or own.head_dim, (*own.weights, *more))


def step_heads(row: Row) -> int:
    """The query heads of Step's layers with a window.

    attention_other_setting may also state KV heads and a head width. They must be the same as in the other layers.
    """
    other, shape = row.reader.nested("attention_other_setting"), row["shape"]
    groups, width = other.optional_integer("num_attention_groups"), other.optional_integer("head_dim")
    if groups not in (None, shape.num_kv_heads) or width not in (None, shape.qk_head_dim):
        raise row.reader.error("attention_other_setting changes K and V of the sliding layers: not supported")
    stated = row.reader.optional_integer("num_sliding_attention_heads") or other.optional_integer("num_attention_heads")
    heads: int = stated or shape.num_heads
    row.reader.check_groups(heads, shape.num_kv_heads)
    return heads


# Recurrences.


def gated_delta(row: Row, **inputs: int) -> Recurrence:
    """A gated delta net with these input projections."""
    key_heads, value_heads = row["linear_num_key_heads"], row["linear_num_value_heads"]
    key, value = row["linear_key_head_dim"], row["linear_value_head_dim"]
    return delta_net(value_heads, key_heads, key, value, row["linear_conv_kernel_dim"], row["hidden_size"], inputs)


def kimi_delta(row: Row, heads: int, head_dim: int, low_ranks: str = "fg") -> Recurrence:
    """Kimi delta attention."""
    return delta_attention(heads, head_dim, row["linear_conv_kernel_dim"], row["hidden_size"], low_ranks)


def short_convolutions(row: Row, shape: AttentionShape, kernel: int, reach: int) -> Recurrence:
    """Inkling's convolutions over keys, values and two outputs, with its weights of distances up to `reach`."""
    width, extent = row["hidden_size"], row["rel_extent"]
    channels = 2 * shape.num_kv_heads * shape.qk_head_dim + 2 * width
    weights = (
        linear("self_attn.r_proj", width, shape.num_heads * row["d_rel"]),
        other("self_attn.rel_logits_proj", row["d_rel"], min(reach, extent)),
        other("sconv", channels, kernel),
    )
    return Recurrence(RecurrentState(channels, kernel, 0, conv_dtype="fp32"), "none", weights=weights)


# The window, or the width, of single families.


def plamo3_window(row: Row) -> int:
    """Older configs state the window for all layers, or in a list with null for the layers without one."""
    config = row.reader
    windows = [window for window in config.items("sliding_window") if window is not None]
    if config.is_list("sliding_window"):
        if not windows or any(window != windows[0] for window in windows):
            raise config.error("sliding_window: all layers with a window must have the same one")
        config = config.with_values({"sliding_window": windows[0]})
    return config.optional_integer("sliding_window") or config.integer("window_size")


def domynedge(row: Row) -> list[tuple[int, int | None]]:
    """The width of the heads and the window of every layer."""
    config, num_layers = row.reader, row["num_layers"]
    stated, own = config.per_layer(num_layers), config.optional_integer("head_dim")
    widths = [layer.get("head_dim", own) for layer in stated] if stated else config.integers("head_sizes", least=1)
    firsts = [pair[0] if isinstance(pair, list) and pair else None for pair in config.items("window_sizes")]
    if not len(widths) == len(firsts) == num_layers:
        raise config.error(f"the widths and window_sizes must list {num_layers} layers")
    found: list[tuple[int, int | None]] = []
    for width, window in zip(widths, firsts):
        if not isinstance(width, int) or not isinstance(window, int):
            raise config.error("the widths of heads and the windows must be numbers")
        found.append((width, window + 1 if window > 0 else None))
    return found


def dots_window(row: Row) -> AttentionShape:
    """The shape of Dots' layers with a window: from per_layer_config, which Transformers saves, or the swa_ keys."""
    config, kinds = row.reader, row["order"]
    stated, defaults = config.per_layer(len(kinds)), defaults_of("_dots3_note_window")
    if stated is None:
        own = {**defaults, **config.shares({f"swa_{key}": key for key in defaults})}
        rope = config.optional_integer("swa_qk_rope_head_dim")
    else:
        layers = [layer for layer, kind in zip(stated, kinds) if kind == "sliding_attention"]
        if any(layer != layers[0] for layer in layers):
            raise config.error("per_layer_config: all layers with a window must be alike")
        own = {**defaults, **config.shares({key: key for key in defaults}), **(layers[0] if layers else {})}
        rope = ConfigReader(own, config.name, config.source).optional_integer("qk_rope_head_dim")
    merged = config.with_values(own)
    width = rope or merged.integer("head_dim") - merged.integer("qk_nope_head_dim")
    own_width = merged.without("qk_rope_head_dim").with_defaults({"qk_rope_head_dim": width})
    return latent_shape(own_width)._replace(head_gate=True)


def dots_draft(row: Row) -> tuple[Mixer, ...]:
    """The mixers of the layers that draft."""
    known = ("full_attention", "indexed_attention", "sliding_attention")
    kinds = {str(kind) for kind in row.reader.items("mtp_layer_types")} or {"sliding_attention"}
    if len(kinds) > 1 or not kinds <= {*known}:
        raise row.reader.error(f"mtp_layer_types: all layers must be alike, and one of {', '.join(known)}")
    kind = "sliding_attention" if kinds == {"sliding_attention"} else "full_attention"
    return (row.value(row.facts["kinds"][kind]),)


def keeps_latent(row: Row) -> list[bool]:
    """Whether every layer keeps a latent, and reads no earlier one."""
    number = row["num_layers"]
    sources = row.reader.integers("kv_source_layers", most=number - 1) or [*range(number)]
    if len(sources) != number:
        raise row.reader.error(f"kv_source_layers must have one number for each of {number} layers")
    return [source == layer for layer, source in enumerate(sources)]


def own_indexers(row: Row) -> list[bool]:
    """Whether every layer has an indexer of its own."""
    return has_indexer(row.reader, row["model_type"], row["num_layers"])


def longcat_layers(row: Row) -> int:
    """Two attention layers in each of the blocks."""
    blocks = row.reader.num_layers("num_layers")
    stated = row.reader.optional_integer("num_hidden_layers")
    if stated not in (None, blocks, 2 * blocks):
        raise row.reader.error(f"num_layers is {blocks} but num_hidden_layers is {stated}")
    return 2 * blocks


def first_of(row: Row, keys: str) -> int:
    """The number of layers under the first key that is there."""
    names = keys.split("|")
    return row.reader.num_layers(next((key for key in names if row.reader.has(key)), names[0]))


def nemotron_blocks(row: Row) -> None:
    """Refuse a Puzzle model whose layers differ in what they keep."""
    keys = "num_attention_heads num_key_value_heads head_dim mamba_num_heads mamba_head_dim n_groups ssm_state_size"
    for block in row.reader.objects("block_configs"):
        for key in (*keys.split(), "conv_kernel"):
            block.refuse(key, "of a single layer is not supported")


def lfm2_width(row: Row) -> int:
    """Two thirds of the stated width, times a factor, rounded up to a multiple. Source: Lfm2MLP."""
    config = row.reader
    inner = config.optional_integer("block_ff_dim") or config.optional_integer("intermediate_size") or 12288
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return inner
    inner = 2 * inner // 3
    if config.mentions("block_ffn_dim_multiplier") and not config.has("block_ffn_dim_multiplier"):
        return inner
    inner = int(config.number("block_ffn_dim_multiplier", default=1.0) * inner)
    return round_up(inner, config.optional_integer("block_multiple_of") or 256)


# Weights outside the mixers.


def experts(row: Row) -> tuple[Weight, ...]:
    """The experts of a layer, by the row's rule."""
    return moe(row.reader, row.rule, row["hidden_size"])  # type: ignore[arg-type]  # a row that calls it has a rule


def narrowed(row: Row, found: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The experts, of which the routed ones read routed_expert_hidden_size elements, if the config states it."""
    width = row["hidden_size"]
    names = {width: optional(row, "routed_expert_hidden_size", width)}
    return tuple(
        each._replace(rows=names.get(each.rows, each.rows), columns=names.get(each.columns, each.columns))
        if each.copies > 1 else each for each in found
    )  # fmt: skip


# The layers with experts.


def every(row: Row, step: int, first: int, experts: int = 1) -> Collection[int]:
    """Every `step`-th layer from the layer `first` on. None if there are no experts."""
    return range(first, row["num_layers"], step) if experts else ()


def stated_layers(row: Row, key: str, default: Collection[int]) -> Collection[int]:
    """The layers whose numbers are listed."""
    return row.reader.integers(key, most=row["num_layers"] - 1) if row.reader.has(key) else default


def listed_sparse(row: Row, first: int, flags: str = "") -> Collection[int]:
    """The layers that mlp_layer_types names, else those with a one under `flags`, else all from `first` on."""
    config, number = row.reader, row["num_layers"]
    default: Collection[int] = range(min(first, number), number)
    if flags and config.has(flags) and not config.has("mlp_layer_types"):
        default = [layer for layer, has in enumerate(config.flags(flags, number)) if has]
    return listed_sparse_layers(config, number, default)


def minimax_m3_sparse(row: Row) -> Collection[int]:
    """All layers, unless mlp_layer_types or moe_layer_freq says otherwise.

    Some published configs have first_k_dense_replace instead. Transformers ignores it, so their weights are not
    counted.
    """
    config = row.reader
    if not any(map(config.has, ("mlp_layer_types", "moe_layer_freq"))) and config.is_set("first_k_dense_replace"):
        raise config.error("first_k_dense_replace without moe_layer_freq: Transformers reads only the latter")
    return listed_sparse(row, 0, "moe_layer_freq")


def step_sparse(row: Row) -> Collection[int]:
    """moe_layers_enum lists the layers with experts, or is a text with commas; by default all but the first three."""
    config, number = row.reader, row["num_layers"]
    if config.is_list("moe_layers_enum"):
        found = config.integers("moe_layers_enum", most=MAX_LAYERS)
    else:
        stated = {f"{layer}": layer for layer in range(number)}
        words = (config.word("moe_layers_enum") or "").replace(" ", "").split(",")
        found = [stated[word] for word in words if word in stated]
    first = config.optional_integer("first_k_dense_replace", least=0)
    default = found or range(min(3 if first is None else first, number), number)
    return listed_sparse_layers(config, number, default)


OF_A_ROW: Mapping[str, Callable[..., Any]] = {
    found.__name__: found
    for found in (
        attention, domynedge, dots_draft, dots_window, equal, every, expanded, experts, first_of, flag, gated_delta,
        grouped, head_width, integer, integers, is_set, keeps_latent, kimi_delta, kinds_of, latent, latent_indexer,
        lfm2_width, listed_sparse, longcat_layers, minimax_m3_sparse, multiple, narrowed, nemotron_blocks, number,
        optional, own_indexers, place, plamo3_window, product, shaped, short_convolutions, stated_layers, step_heads,
        step_sparse, theta, time_step_rank, times,
    )
}  # fmt: skip
"""Functions that also take the row."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{found.__name__: found for found in (
        changed, either, gated_mlp, hyper_connection, int, linear, lookup, mamba, mamba2, norm, other, plain_mlp,
        replicated, round_up, router, short_convolution, weights,
    )},
    "copies": tensors.experts, "indexer": Indexer, "recurrence": Recurrence, "state": RecurrentState,
}  # fmt: skip
