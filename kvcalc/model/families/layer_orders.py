"""The functions that the formulas of presets/types/layers.yaml may call to find the kind of every layer.

Each returns the kinds, or None if the config does not say them in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcalc.model.families.indexers import has_indexer
from kvcalc.model.families.layer_row import Row
from kvcalc.model.reader import MAX_LAYERS


def listed(row: Row, key: str = "layer_types", renamed: str = "", *, ahead: bool = False) -> list[str] | None:
    """The kinds in a list. `renamed`: other names of kinds, each as `name=kind`. Kinds with an underscore have none.

    `ahead`: the list may include the layers for multi-token prediction, which are left out.
    """
    config, number = row.reader, row["num_layers"]
    names = dict(name.split("=") for name in renamed.split())
    own = (kind for kind in row.facts["kinds"] if not kind.startswith("_"))
    more = config.optional_integer("num_nextn_predict_layers", least=0) if ahead else None
    has_more = bool(more) and len(config.items(key)) != number
    kinds = config.strings(key, number + (more or 0) if has_more else number, (*own, *names))
    return None if kinds is None else [names.get(kind, kind) for kind in kinds[:number]]


def flagged(row: Row, key: str, zero: str, one: str) -> list[str] | None:
    """The kinds by a list of zeros and ones."""
    if row.reader.is_any(key, None, []):
        return None
    return [one if flag else zero for flag in row.reader.flags(key, row["num_layers"])]


def numbered(row: Row, key: str, one: str, rest: str, *, beyond: bool = False) -> list[str] | None:
    """The kinds by a list of the layers of one kind. `beyond`: it may name layers that there are not."""
    if not row.reader.has(key):
        return None
    found = row.reader.integers(key, most=MAX_LAYERS if beyond else row["num_layers"] - 1)
    return [one if layer in found else rest for layer in range(row["num_layers"])]


def one_in(row: Row, step: int, one: str, rest: str, at: int | None = None, first: int = 0) -> list[str]:
    """The last of every `step` layers is of one kind, or the one `at` this place, and so are the `first` layers."""
    place = step - 1 if at is None else at
    return [one if layer < first or layer % step == place else rest for layer in range(row["num_layers"])]


def cycle(row: Row, pattern: str) -> list[str]:
    """The kinds in a pattern that repeats."""
    kinds = pattern.split()
    return [kinds[layer % len(kinds)] for layer in range(row["num_layers"])]


def cycled(row: Row, *keys: str, fits: bool = False) -> list[str] | None:
    """The kinds in the list under the first of the keys, which repeats. `fits`: it has no more kinds than layers."""
    config, known = row.reader, [*row.facts["kinds"]]
    kinds = next((found for key in keys if (found := [*map(str, config.items(key))])), None)
    if kinds is None:
        return None
    if not {*kinds} <= {*known} or (fits and len(kinds) > row["num_layers"]):
        more = ", each layer at most once" if fits else ""
        raise config.error(f"{keys[0]} may contain only {' and '.join(known)}{more}")
    return cycle(row, " ".join(kinds))


def if_set(row: Row, key: str, order: list[str]) -> list[str] | None:
    """An order for configs that set a key."""
    return order if row.reader.is_set(key) else None


def required(row: Row, key: str, why: str = "") -> None:
    """Refuse a config that does not say what its layers are."""
    raise row.reader.error(f"{key} is missing{why}")


def repeated(row: Row, order: list[str], kind: str, passes: int) -> list[str]:
    """All layers run several times, from the second time on as another kind."""
    return order + [kind] * (len(order) * (passes - 1))


# The rules of single families.


def gpt_neo(row: Row) -> list[str]:
    """attention_types repeats short lists, for example [[["global", "local"], 12]]."""
    config, num_layers, known = row.reader, row["num_layers"], ("global", "local")
    stated = config.listed("attention_types")
    kinds: list[object] = []
    for group in [[["global", "local"], 12]] if stated is None else stated:
        if not isinstance(group, list) or len(group) != 2 or not isinstance(group[0], list):
            raise config.error("attention_types must contain pairs of a list of kinds and a number")
        names, times = group
        if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= num_layers:
            raise config.error("attention_types must repeat a list at most as often as there are layers")
        kinds += [*names] * times
    found = [kind for kind in kinds if isinstance(kind, str) and kind in known]
    if not len(kinds) == len(found) == num_layers:
        raise config.error(f"attention_types must name global or local for each of {num_layers} layers")
    if config.strings("attention_layers", num_layers, known) not in (None, found):
        raise config.error("attention_layers contradicts attention_types")
    return found


def hrm(row: Row, order: list[str]) -> list[str]:
    """The number of passes, unless the config states it."""
    if row.reader.has("num_layers_per_stack"):
        return order
    cycles = (row.reader.integer(key, most=MAX_LAYERS) for key in ("H_cycles", "L_cycles"))
    return order * (next(cycles) * (next(cycles) + 1))


def dory(row: Row, order: list[str]) -> list[str]:
    """The layers in the middle run several times, and each time keep their own K and V, or those of the last time."""
    config = row.reader
    first, last = (config.integer(key, least=0) for key in ("n_input_layers", "n_output_layers"))
    is_once = config.is_any("recurrent_kv_cache_mode", "last_loop")
    again = 0 if is_once else config.integer("n_recurrent_loops", most=MAX_LAYERS) - 1
    return order + [kind for kind in order[first : len(order) - last] if kind != "mlp"] * again


def iquest_q1(row: Row) -> list[str]:
    """Some first layers, a block of layers that repeats, and some last layers."""
    config, num_layers = row.reader, row["num_layers"]
    if not all(config.boolean(key, default=True) for key in ("use_hybrid_layers", "use_sliding_window")):
        return ["full_attention"] * num_layers
    times = config.integer("num_hybrid_layers_block", most=MAX_LAYERS)
    parts = [config.items(key) for key in ("first_layers_types", "hybrid_layers_types_block", "last_layers_types")]
    kinds = [*map(str, [*parts[0], *parts[1] * times, *parts[2]])]
    if len(kinds) != num_layers or not {*row.facts["kinds"]}.issuperset(kinds):
        raise config.error(f"the lists of layer types must name {num_layers} layers with or without a window")
    return kinds


def with_ngrams(row: Row, order: list[str]) -> list[str]:
    """The layers in ple_layer_ids, counted from 1, have features of n-grams."""
    found = row.reader.integers("ple_layer_ids", least=1, most=len(order))
    if any(order[number - 1] != "linear_attention" for number in found):
        raise row.reader.error("ple_layer_ids: only layers with linear_attention may have n-grams")
    return ["_with_ngrams" if number in found else kind for number, kind in enumerate(order, 1)]


def kimi_linear(row: Row) -> list[str]:
    """linear_attn_config lists each layer once, counted from 1, in full_attn_layers or in kda_layers."""
    config, num_layers = row.reader, row["num_layers"]
    nested = config.nested("linear_attn_config")
    if not nested.mentions("full_attn_layers") or not nested.mentions("kda_layers"):
        raise config.error("layer_types is missing, and so are full_attn_layers or kda_layers in linear_attn_config")
    full, delta = (nested.integers(key, least=1, most=num_layers) for key in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *delta]) != list(range(1, num_layers + 1)):
        raise config.error(f"full_attn_layers and kda_layers must list each of {num_layers} layers once")
    return ["full_attention" if number in full else "linear_attention" for number in range(1, num_layers + 1)]


def sharing_indexers(row: Row, order: list[str], kind: str, without: str) -> list[str]:
    """Layers without an indexer of their own are of another kind."""
    has = has_indexer(row.reader, row["model_type"], len(order))
    return [without if own == kind and not has[layer] else own for layer, own in enumerate(order)]


def minimax_m3(row: Row) -> list[str]:
    """sparse_attention_freq of sparse_attention_config has ones for the layers with an indexer, if they are used."""
    nested, number = row.reader.nested("sparse_attention_config"), row["num_layers"]
    if not nested.has("sparse_attention_freq") or not nested.boolean("use_sparse_attention", default=True):
        return ["full_attention"] * number
    kinds = ("full_attention", "minimax_m3_sparse")
    return [kinds[flag] for flag in nested.flags("sparse_attention_freq", number)]


def lfm3(row: Row) -> list[str]:
    """A pattern of four layers repeats, whose window the first layer does not have."""
    return ["conv", *cycle(row, "sliding_attention conv full_attention conv")[1:]]


def zamba(row: Row) -> list[str]:
    """The third layer is hybrid, and those after it by a period and an offset."""
    period, offset = row.reader.integer("attn_layer_period"), row.reader.integer("attn_layer_offset", least=0)
    rest = one_in(row, period, "hybrid", "mamba", offset)
    return ["mamba", "mamba", "hybrid", *rest][: row["num_layers"]]


def zamba2(row: Row) -> list[str]:
    """The order of Zamba2's 54 layers."""
    letters = "M" + "MMMMMH" * 7 + "MMMMH" + "MMMH" + "MM"
    if row["num_layers"] != len(letters):
        required(row, "layers_block_type", ": there is a default only for Zamba2-2.7B with 54 layers")
    return ["hybrid" if letter == "H" else "mamba" for letter in letters]


def nemotron_h(row: Row) -> list[str]:
    """hybrid_override_pattern has one letter per layer. Their number must match num_hidden_layers if it is there."""
    config, letters = row.reader, {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = config.chosen("hybrid_override_pattern", letters, f"may contain only {', '.join(letters)}")
    if pattern is None:
        listed = len(config.items("layers_block_type"))
        num_layers = config.optional_integer("num_hidden_layers", most=MAX_LAYERS) or listed
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        stated = config.strings("layers_block_type", num_layers, (*letters.values(), *names))
        if stated is None:
            raise config.error("hybrid_override_pattern is missing")
        return [names.get(kind, kind) for kind in stated]
    if not pattern:
        raise config.error("hybrid_override_pattern is empty")
    if config.optional_integer("num_hidden_layers") not in (None, len(pattern)):
        raise config.error(f"hybrid_override_pattern has {len(pattern)} layers: num_hidden_layers differs")
    return pattern


def inkling_loop(row: Row, order: list[str]) -> list[str]:
    """The layers in the middle run several times."""
    first, end = row["loop_layer_index_start"], row.reader.integer("loop_layer_index_end", most=len(order))
    return [*order, *order[first:end] * (row.reader.integer("loop_num_passes", most=MAX_LAYERS) - 1)]


ORDERS: Mapping[str, Callable[..., Any]] = {
    found.__name__: found
    for found in (
        cycle, cycled, dory, flagged, gpt_neo, hrm, if_set, inkling_loop, iquest_q1, kimi_linear, lfm3, listed,
        minimax_m3, nemotron_h, numbered, one_in, repeated, required, sharing_indexers, with_ngrams, zamba, zamba2,
    )
}  # fmt: skip
