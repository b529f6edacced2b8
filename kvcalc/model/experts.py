"""Mixture-of-experts layers: the keys for their sizes, the names of their weights, and which layers have experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcalc.model.reader import ConfigReader
from kvcalc.model.tensors import Weight, experts, gated_mlp, linear, other, router
from kvcalc.records import NamedTuple

# All keys for the number of experts. Source: attribute_map of the configuration classes, Transformers 5.23.0.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED_KEYS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Of text, and of images.
_MOST_SETS = 2


class Experts(NamedTuple):
    """The experts of a family: the keys for their sizes, the names of their weights, and which layers have experts.

    `layers` is `all`, `step` (by decoder_sparse_step and mlp_only_layers), `first_dense` (all layers after the first
    first_k_dense_replace or num_dense_layers), `listed` (the same, unless mlp_layer_types lists them) or `interval`
    (every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index). `shared`: each layer also
    has n_shared_experts experts that every token reads, `shared_name` in the checkpoint; `shared_inner` is the key for
    the width of each, if it is not that of the others (then there is one, unless the config says how many), and
    `shared_bias` the key for their biases. A config may list the number and the width of a second set of experts, which
    only tokens of images read. `gated_shared`: each layer also has one expert of shared_expert_intermediate_size, with
    a gate. `corrects`: each layer adds a number per expert to the scores.
    """

    number: str = "num_local_experts"
    inner: str = "moe_intermediate_size"
    prefix: str = "mlp"
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    layers: str = "all"
    shared: bool = False
    gated_shared: bool = False
    corrects: bool = False
    shared_bias: str = ""
    shared_inner: str = ""
    shared_name: str = "shared_experts"


def with_defaults(config: ConfigReader, defaults: Mapping[str, object]) -> ConfigReader:
    """Return `config` with a family's defaults.

    The default for the number of experts is left out if the config states that number under any of its names.
    """
    if any(config.has(key) for key in _EXPERT_KEYS):
        defaults = {key: value for key, value in defaults.items() if key not in _EXPERT_KEYS}
    return config.with_defaults(defaults)


def sparse_layers(config: ConfigReader, rule: Experts, num_layers: int) -> Collection[int]:
    """Return the numbers of the layers that have experts, by the keys of `rule`."""
    if rule.layers in ("first_dense", "listed"):
        first = config.integer("first_k_dense_replace", "num_dense_layers", least=0)
        after = range(min(first, num_layers), num_layers)
        return listed_sparse_layers(config, num_layers, after) if rule.layers == "listed" else after
    if rule.layers == "interval":
        step, first = config.integer("moe_layer_interval"), config.integer("moe_layer_start_index", least=0)
        last = config.optional_integer("moe_layer_end_index", least=-1)
        stop = num_layers if last is None or last < 0 else min(last + 1, num_layers)
        return [number for number in range(first, stop) if (number + 1) % step == 0]
    if rule.layers == "step":
        step = config.optional_integer("decoder_sparse_step", least=1) or 1
        dense = frozenset(number for number in config.items("mlp_only_layers") if type(number) is int)
        return [number for number in range(num_layers) if number not in dense and (number + 1) % step == 0]
    return range(num_layers)


def listed_sparse_layers(config: ConfigReader, num_layers: int, default: Collection[int]) -> Collection[int]:
    """Return the layers that mlp_layer_types calls sparse, or `default` if the config has no such list."""
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    return default if kinds is None else [number for number, kind in enumerate(kinds) if kind == "sparse"]


def choose(
    num_layers: int, sparse: Collection[int], moe: tuple[Weight, ...], dense: tuple[Weight, ...]
) -> list[tuple[Weight, ...]]:
    """Return the MLP of every layer: `moe` for the layers in `sparse`, `dense` for the others."""
    among = frozenset(sparse)
    return [moe if number in among else dense for number in range(num_layers)]


def moe(config: ConfigReader, rule: Experts, width: int) -> tuple[Weight, ...]:
    """Return the router, the experts and (if the family has them) the shared experts of one layer."""
    config = _uniform(config, "moe_topk")
    widths = config.integers(rule.inner, least=1) if config.is_list(rule.inner) else [config.integer(rule.inner)]
    if config.is_list(rule.number):
        counts = config.integers(rule.number, least=1)
    else:
        counts = [config.integer(rule.number, *_EXPERT_KEYS)]
    counts *= len(widths) if len(counts) == 1 else 1
    if not 0 < len(widths) <= _MOST_SETS or len(counts) != len(widths):
        raise config.error(f"{rule.number} and {rule.inner} must have the same number of entries, up to {_MOST_SETS}")
    read = config.integer("num_experts_per_tok", "moe_topk", "moe_k")
    if read > counts[0]:
        raise config.error(f"num_experts_per_tok {read} is more than {rule.number} {counts[0]}")
    weights = _experts(rule, rule.prefix, width, widths[0], counts[0], read)
    if len(widths) > 1:
        weights += _experts(rule, f"{rule.prefix}.of_images", width, widths[1], counts[1], 0)
    if rule.shared:
        if rule.shared_inner:
            config = config.with_defaults({} if any(map(config.has, _SHARED_KEYS)) else {_SHARED_KEYS[0]: 1})
        each = config.integer(rule.shared_inner, least=0) if rule.shared_inner else widths[0]
        shared = each * config.integer(*_SHARED_KEYS, least=0)
        bias = bool(rule.shared_bias) and config.boolean(rule.shared_bias, default=False)
        weights += gated_mlp(f"{rule.prefix}.{rule.shared_name}", width, shared, bias) if shared else ()
    if rule.gated_shared:
        wide = config.integer("shared_expert_intermediate_size")
        weights += gated_mlp(f"{rule.prefix}.shared_expert", width, wide)
        weights += (router(f"{rule.prefix}.shared_expert_gate", width, 1),)
    return weights


def _uniform(config: ConfigReader, key: str) -> ConfigReader:
    """Return `config` with one number under `key` if it lists the same number for every layer (Hunyuan)."""
    listed = {*config.integers(key)} if config.is_list(key) else ()
    return config.with_values({key: next(iter(listed))}) if len(listed) == 1 else config


def _experts(rule: Experts, prefix: str, width: int, inner: int, count: int, read: int) -> tuple[Weight, ...]:
    gate, up, down = rule.names
    matrices = (
        linear(f"{prefix}.experts.0.{gate}", width, inner, rule.bias),
        linear(f"{prefix}.experts.0.{up}", width, inner, rule.bias),
        linear(f"{prefix}.experts.0.{down}", inner, width, rule.bias),
    )
    weights = (router(f"{prefix}.{rule.router}", width, count, rule.bias), *experts(matrices, count, read))
    return (*weights, other(f"{prefix}.{rule.router}.e_score_correction_bias", count)) if rule.corrects else weights
