"""The functions that the formulas of presets/types/layers.yaml may call.

Those whose first parameter is `row` also take the row, which no formula names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvcalc.model import tensors
from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import listed_sparse_layers, moe
from kvcalc.model.families.common import grouped_shape, hyper_connection, latent_shape
from kvcalc.model.families.layer_row import Row
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import Attention, AttentionShape, Indexer, Projections
from kvcalc.model.mixers.recurrent import Recurrence, delta_attention, delta_net, mamba, mamba2, short_convolution
from kvcalc.model.reader import MAX_INTEGER, MAX_LAYERS
from kvcalc.model.tensors import (
    Block,
    Weight,
    gated_mlp,
    linear,
    lookup,
    norm,
    other,
    plain_mlp,
    replicated,
    router,
    weights,
)

# What a config says. `a|b` is a key and its other name, and `of` the path of the object that the key is in.


def integer(row: Row, key: str, *, least: int = 1, most: int = MAX_INTEGER, of: str = "") -> int:
    """The integer under a key, which must be there."""
    return row.inside(of).integer(*key.split("|"), least=least, most=most)


def optional(row: Row, key: str, default: Any = None, *, least: int = 1, most: int = MAX_INTEGER, of: str = "") -> Any:
    """The integer under a key, or the default, which may be a formula."""
    number = row.inside(of).optional_integer(*key.split("|"), least=least, most=most)
    return row.value(default) if number is None else number


def times(row: Row, key: str) -> int:
    """How often something repeats: at most the largest number of layers."""
    return row.reader.integer(*key.split("|"), most=MAX_LAYERS)


def number(row: Row, key: str, default: float, *, of: str = "") -> float:
    """The number under a key, or the default."""
    return row.inside(of).number(key, default)


def flag(row: Row, key: str, default: bool = False) -> bool:
    """The boolean under a key, or the default."""
    return row.reader.boolean(key, default)


def is_set(row: Row, key: str, *, of: str = "") -> bool:
    """Whether the value under a key is there and is not null, false, zero or empty."""
    return row.inside(of).is_set(key)


def begins(row: Row, key: str, text: str) -> bool:
    """Whether the text under a key, which must be there, begins with another."""
    return row.reader.text(key).startswith(text)


def is_class(row: Row, name: str) -> bool:
    """Whether the name of the checkpoint's class ends with this one."""
    return str(next(iter(row.reader.items("architectures")), "")).endswith(name)


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


def shaped(
    row: Row, heads: int, kv_heads: int, width: int, hidden_size: int | None = 0, **own: Any
) -> AttentionShape:  # fmt: skip
    """The shape of attention whose keys and values are equally wide.

    `hidden_size` is the model's width: by default the config's, and None if that is not known.
    """
    kv_heads, hidden_size = (
        row.reader.check_groups(heads, kv_heads),
        row["hidden_size"] if hidden_size == 0 else hidden_size,
    )
    return AttentionShape(heads, kv_heads, width, own.pop("v_width", width), hidden_size, **own)


def attention(row: Row, shape: AttentionShape | None = None, **own: Any) -> Attention:
    """Attention of the row's shape. `own` are fields of `Attention`, and of `Projections`."""
    if "qk_norms" in own:
        own["qk_norms"] = tuple(own["qk_norms"].split())
    names = Projections(**{name: own.pop(name) for name in [*own] if name in Projections._fields})
    return Attention(shape or row["shape"], names=names, **own)


def mixers_of(row: Row, kind: str) -> tuple[Mixer, ...]:
    """The mixers of a kind of layer."""
    return tuple(mixer for mixer in row.all_of(row.facts["kinds"][kind]) if mixer is not None)


def changed(shape: AttentionShape, **own: Any) -> AttentionShape:
    """A shape with other fields."""
    return shape._replace(**own)


def latent_indexer(row: Row, head_dim: int = 0, more: tuple[Weight, ...] = ()) -> Indexer:
    """The indexer of MLA. Its keys may be wider than its queries, and it may have more weights.

    Every rank holds its projections (ReplicatedLinear, DeepseekV2MLAAttention of vLLM 0.33.0), because all heads share
    its keys. Source: DeepseekV32Indexer, Transformers 5.23.0.
    """
    heads, width, shape = row.reader.optional_integer("index_n_heads") or 1, row["index_head_dim"], row["shape"]
    own = (
        replicated("self_attn.indexer.wq_b", shape.q_lora_rank, heads * width),
        replicated("self_attn.indexer.wk", row["hidden_size"], width),
        norm("self_attn.indexer.k_norm", width, bias=True),
        # Published in 16 or 32 bits, although the other weights of the layer have 8 bits.
        other("self_attn.indexer.weights_proj", heads, row["hidden_size"]),
    )
    return Indexer(heads, head_dim or width, (*own, *more))


# Recurrences.


def gated_delta(row: Row, **inputs: int) -> Recurrence:
    """A gated delta net with these input projections."""
    key_heads, value_heads = row["linear_num_key_heads"], row["linear_num_value_heads"]
    key, value = row["linear_key_head_dim"], row["linear_value_head_dim"]
    return delta_net(value_heads, key_heads, key, value, row["linear_conv_kernel_dim"], row["hidden_size"], inputs)


def kimi_delta(row: Row, heads: int, head_dim: int, low_ranks: str = "fg") -> Recurrence:
    """Kimi delta attention."""
    return delta_attention(heads, head_dim, row["linear_conv_kernel_dim"], row["hidden_size"], low_ranks)


def first_of(row: Row, keys: str) -> int:
    """The number of layers under the first key that is there."""
    names = keys.split("|")
    return row.reader.num_layers(next((key for key in names if row.reader.has(key)), names[0]))


def experts(row: Row) -> tuple[Weight, ...]:
    """The experts of a layer, by the row's rule."""
    return moe(row.reader, row.rule, row["hidden_size"])  # type: ignore[arg-type]  # a row that calls it has a rule


# Weights outside the mixers, and the layers with experts.


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


def block(prefix: str, number: int, *parts: Attention | Weight | tuple[Weight, ...]) -> Block:
    """The weights of `number` layers of another stack: those of attention, or others."""
    found = (part.weights if isinstance(part, Attention) else part for part in parts)
    return Block(prefix, range(number), weights(*found))


def encoder(prefix: str, number: int, *parts: Attention | Weight | tuple[Weight, ...]) -> Block:
    """The same for layers that a decode step does not read."""
    return tensors.unread(block(prefix, number, *parts))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (
        block, changed, encoder, gated_mlp, hyper_connection, int, linear, lookup, mamba, mamba2, norm, other,
        plain_mlp, replicated, round_up, router, short_convolution, weights,
    )},
    "copies": tensors.experts, "indexer": Indexer, "recurrence": Recurrence, "state": RecurrentState,
}  # fmt: skip
