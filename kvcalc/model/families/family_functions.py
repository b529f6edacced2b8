"""The functions that the formulas of presets/types/layers.yaml call for a single family.

They find the kind of every layer, sizes, and what a layer has that no other family's layers have. Families with more
than a few such functions have a module of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, islice
from math import isqrt

from kvcalc.model.caches import RecurrentState
from kvcalc.model.experts import listed_sparse_layers
from kvcalc.model.families.common import latent_shape
from kvcalc.model.families.layer_functions import listed_sparse, mixers_of, optional, round_up
from kvcalc.model.families.layer_orders import cycle, one_in, required
from kvcalc.model.families.layer_row import Row
from kvcalc.model.layers import Mixer
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.mixers.recurrent import Recurrence
from kvcalc.model.reader import MAX_LAYERS, ConfigReader
from kvcalc.model.tensors import Weight, linear, norm, other, replicated
from kvcalc.model.type_tables import defaults_of

# The kind of every layer.


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
    known_kinds = [kind for kind in kinds if isinstance(kind, str) and kind in known]
    if not len(kinds) == len(known_kinds) == num_layers:
        raise config.error(f"attention_types must name global or local for each of {num_layers} layers")
    if config.strings("attention_layers", num_layers, known) not in (None, known_kinds):
        raise config.error("attention_layers contradicts attention_types")
    return known_kinds


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
    layers = row.reader.integers("ple_layer_ids", least=1, most=len(order))
    if any(order[number - 1] != "linear_attention" for number in layers):
        raise row.reader.error("ple_layer_ids: only layers with linear_attention may have n-grams")
    return ["_with_ngrams" if number in layers else kind for number, kind in enumerate(order, 1)]


def stream_mixer(row: Row, name: str, injected: int) -> tuple[Weight, ...]:
    """What mixes the residual streams into the input of a block, and with `injected` streams its output into them."""
    wide, rank = row["hc_count"] * row["hidden_size"], row["hc_lowrank"]
    mixer = (
        norm(f"{name}.hc_norm", wide),
        replicated(f"{name}.input_mix_weight_down", wide, rank),
        replicated(f"{name}.input_mix_weight_up", rank, wide),
    )
    return (*mixer, replicated(f"{name}.block_inject_weight", wide, injected)) if injected else mixer


def ngram_rows(row: Row) -> int:
    """The rows of all tables of n-grams: of each head a prime number, the next ones after ngram_vocab_size_base - 1.

    Source: _find_nth_prime_after, modeling_qwen4_exp.py, Transformers 5.24.0.
    """
    base = row.reader.integer("ngram_vocab_size_base", least=2, most=10**9)
    heads, layers = (row["ngram_size"] - 1) * row["heads_per_ngram"], row.reader.integers("ple_layer_ids")
    if heads * len(layers) > 1000:
        raise row.reader.error("ple_layer_ids: more than 1,000 tables of n-grams are not counted")
    primes = (number for number in count(base) if all(number % low for low in range(2, isqrt(number) + 1)))
    return sum(round_up(sum(islice(primes, heads)), row["make_ngram_vocab_size_divisible_by"]) for _ in layers)


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
    has = own_indexers(row)
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


# Sizes, shapes and mixers.


def nemotron_blocks(row: Row) -> None:
    """Refuse a Puzzle model whose layers differ in what they keep."""
    keys = "num_attention_heads num_key_value_heads head_dim mamba_num_heads mamba_head_dim n_groups ssm_state_size"
    for block in row.reader.objects("block_configs"):
        for key in (*keys.split(), "conv_kernel"):
            block.refuse(key, "of a single layer is not supported")


def longcat_layers(row: Row) -> int:
    """Two attention layers in each of the blocks."""
    blocks = row.reader.num_layers("num_layers")
    stated = row.reader.optional_integer("num_hidden_layers")
    if stated not in (None, blocks, 2 * blocks):
        raise row.reader.error(f"num_layers is {blocks} but num_hidden_layers is {stated}")
    return 2 * blocks


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
    stated, head_dim = config.per_layer(num_layers), config.optional_integer("head_dim")
    widths = [layer.get("head_dim", head_dim) for layer in stated] if stated else config.integers("head_sizes", least=1)
    firsts = [pair[0] if isinstance(pair, list) and pair else None for pair in config.items("window_sizes")]
    if not len(widths) == len(firsts) == num_layers:
        raise config.error(f"the widths and window_sizes must list {num_layers} layers")
    sizes: list[tuple[int, int | None]] = []
    for width, window in zip(widths, firsts):
        if not isinstance(width, int) or not isinstance(window, int):
            raise config.error("the widths of heads and the windows must be numbers")
        sizes.append((width, window + 1 if window > 0 else None))
    return sizes


def dots_window(row: Row) -> AttentionShape:
    """The shape of Dots' layers with a window: from per_layer_config, which Transformers saves, or the swa_ keys."""
    config, kinds = row.reader, row["order"]
    stated, defaults = config.per_layer(len(kinds)), defaults_of("_dots3_note_window")
    if stated is None:
        layer_facts = {**defaults, **config.shares({f"swa_{key}": key for key in defaults})}
        rope = config.optional_integer("swa_qk_rope_head_dim")
    else:
        layers = [layer for layer, kind in zip(stated, kinds) if kind == "sliding_attention"]
        if any(layer != layers[0] for layer in layers):
            raise config.error("per_layer_config: all layers with a window must be alike")
        layer_facts = {**defaults, **config.shares({key: key for key in defaults}), **(layers[0] if layers else {})}
        rope = ConfigReader(layer_facts, config.name, config.source).optional_integer("qk_rope_head_dim")
    merged = config.with_values(layer_facts)
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
    return mixers_of(row, kind)


def keeps_latent(row: Row) -> list[bool]:
    """Whether every layer keeps a latent, and reads no earlier one."""
    number = row["num_layers"]
    sources = row.reader.integers("kv_source_layers", most=number - 1) or [*range(number)]
    if len(sources) != number:
        raise row.reader.error(f"kv_source_layers must have one number for each of {number} layers")
    return [source == layer for layer, source in enumerate(sources)]


def own_indexers(row: Row) -> list[bool]:
    """Whether every layer has an indexer of its own. The others reuse the tokens picked by the last indexer.

    GLM-5.2 states this as a list (indexer_types), as a string of F and S (index_topk_pattern), or as a step
    (index_topk_freq) with an offset. Hunyuan 4 states a list; without one, the first layer and then every fourth layer
    from the second on have an indexer. Source: GlmMoeDsaConfig and HYV4Config, Transformers 5.23.0.
    """
    config, model_type, num_layers = row.reader, row["model_type"], row["num_layers"]
    if model_type not in ("glm5_next_text", "glm_moe_dsa", "hy_v4", "mistral_large4_text"):
        return [True] * num_layers
    kinds = config.strings("indexer_types", num_layers, ("full", "shared"))
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    if model_type == "hy_v4":
        return [number == 0 or number % 4 == 1 for number in range(num_layers)]
    must = f"must give F or S for each of {num_layers} layers"
    pattern = config.chosen("index_topk_pattern", {"F": True, "S": False, "full": True, "shared": False}, must)
    if pattern is not None:
        if len(pattern) != num_layers:
            raise config.error(f"index_topk_pattern {must}")
        return pattern
    step = max(config.optional_integer("index_topk_freq", least=0) or 1, 1)
    offset = config.optional_integer("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return [max(number - offset + 1, 0) % step == 0 for number in range(num_layers)]


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


# Experts.


def narrowed(row: Row, found: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """The experts, of which the routed ones read routed_expert_hidden_size elements, if the config states it."""
    width = row["hidden_size"]
    names = {width: optional(row, "routed_expert_hidden_size", width)}
    return tuple(
        each._replace(rows=names.get(each.rows, each.rows), columns=names.get(each.columns, each.columns))
        if each.copies > 1 else each for each in found
    )  # fmt: skip


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
        sparse = config.integers("moe_layers_enum", most=MAX_LAYERS)
    else:
        stated = {f"{layer}": layer for layer in range(number)}
        words = (config.word("moe_layers_enum") or "").replace(" ", "").split(",")
        sparse = [stated[word] for word in words if word in stated]
    first = config.optional_integer("first_k_dense_replace", least=0)
    default = sparse or range(min(3 if first is None else first, number), number)
    return listed_sparse_layers(config, number, default)
