"""Layers of experts: the keys that size them, the names of their weights, and which layers have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcalc.model.reader import ConfigReader
from kvcalc.model.tensors import Weight, experts, gated_mlp, linear, router

# The number of experts under all its names. Source: attribute_map of the configuration classes, Transformers 5.23.0.
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


class Experts:
    """A layer of experts: the keys that size it, the names its weights have, and which layers have one.

    `layers`: all; `step` (decoder_sparse_step and mlp_only_layers); `first_dense` (after first_k_dense_replace layers).
    `shared`: n_shared_experts further experts, all of which every token reads; `gated_shared`: one further expert of
    shared_expert_intermediate_size, and a gate for it.
    """

    def __init__(
        self,
        number: str = "num_local_experts",
        inner: str = "moe_intermediate_size",
        prefix: str = "mlp",
        router: str = "gate",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        layers: str = "all",
        shared: bool = False,
        gated_shared: bool = False,
    ) -> None:
        self.number, self.inner = number, inner
        self.prefix, self.router, self.names = prefix, router, names
        self.bias, self.layers = bias, layers
        self.shared, self.gated_shared = shared, gated_shared


def with_defaults(config: ConfigReader, defaults: Mapping[str, object]) -> ConfigReader:
    """`config` with a family's defaults; not that of the number of experts where it stands under another name."""
    if any(config.config.get(key) is not None for key in _EXPERT_KEYS):
        defaults = {key: value for key, value in defaults.items() if key not in _EXPERT_KEYS}
    return config.with_defaults(defaults)


def sparse_layers(config: ConfigReader, rule: Experts, num_layers: int) -> Collection[int]:
    """The layers which have experts, by the keys of `rule`."""
    if rule.layers == "first_dense":
        return range(min(config.integer("first_k_dense_replace", least=0), num_layers), num_layers)
    if rule.layers == "step":
        step = config.optional_integer("decoder_sparse_step", least=1) or 1
        dense = frozenset(number for number in config.items("mlp_only_layers") if type(number) is int)
        return [number for number in range(num_layers) if number not in dense and (number + 1) % step == 0]
    return range(num_layers)


def listed_sparse_layers(config: ConfigReader, num_layers: int, default: Collection[int]) -> Collection[int]:
    """The layers mlp_layer_types calls sparse; `default` where the config has no such list."""
    kinds = config.strings("mlp_layer_types", num_layers, ("dense", "sparse"))
    return default if kinds is None else [number for number, kind in enumerate(kinds) if kind == "sparse"]


def choose(
    num_layers: int, sparse: Collection[int], moe: tuple[Weight, ...], dense: tuple[Weight, ...]
) -> list[tuple[Weight, ...]]:
    """The MLP of every layer: `moe` in the layers of `sparse`, `dense` in the others."""
    among = frozenset(sparse)
    return [moe if number in among else dense for number in range(num_layers)]


def moe(config: ConfigReader, rule: Experts, width: int) -> tuple[Weight, ...]:
    """Router, experts and, where the family has them, shared experts of one layer."""
    count, inner = config.integer(rule.number, *_EXPERT_KEYS), config.integer(rule.inner)
    read = config.integer("num_experts_per_tok")
    if read > count:
        raise config.error(f"num_experts_per_tok {read} is more than {rule.number} {count}")
    one = f"{rule.prefix}.experts.0"
    gate, up, down = rule.names
    matrices = (
        linear(f"{one}.{gate}", width, inner, rule.bias),
        linear(f"{one}.{up}", width, inner, rule.bias),
        linear(f"{one}.{down}", inner, width, rule.bias),
    )
    found = (router(f"{rule.prefix}.{rule.router}", width, count, rule.bias), *experts(matrices, count, read))
    if rule.shared:
        shared = config.integer("n_shared_experts", least=0)
        found += gated_mlp(f"{rule.prefix}.shared_experts", width, inner * shared) if shared else ()
    if rule.gated_shared:
        wide = config.integer("shared_expert_intermediate_size")
        found += gated_mlp(f"{rule.prefix}.shared_expert", width, wide)
        found += (router(f"{rule.prefix}.shared_expert_gate", width, 1),)
    return found
