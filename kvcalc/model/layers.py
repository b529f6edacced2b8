"""The layers of a model: what each one caches, which weights it has, and what it computes.

Each fact is stated here once. All totals are sums over the layers: the bytes of the cache, the weights, the share of
each device, the bytes and operations of a step, and the parameters of the attention modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvcalc.model.caches import Cache
from kvcalc.model.mixers.attention import Attention, Flops
from kvcalc.model.tensors import Around, Block, ModelWeights, Weight
from kvcalc.records import NamedTuple


class Mixer(Protocol):
    """The part of a layer that mixes tokens (`kvcalc.model.mixers`).

    `flops(ranks)` returns the operations for each item of `caches` on one of `ranks` tensor-parallel ranks. `launches`
    is the fixed cost of its kernels in a decode step, besides those of its matrices and norms.
    """

    @property
    def caches(self) -> tuple[Cache, ...]: ...

    @property
    def weights(self) -> tuple[Weight, ...]: ...

    @property
    def launches(self) -> int: ...

    def flops(self, ranks: int) -> tuple[Flops, ...]: ...


class Layer(NamedTuple):
    """The parts of one layer: its mixers (usually one, two in Falcon-H1), its MLP or experts, and its norms."""

    mixers: tuple[Mixer, ...] = ()
    mlp: tuple[Weight, ...] = ()
    norms: tuple[Weight, ...] = ()

    @property
    def caches(self) -> tuple[Cache, ...]:
        return tuple(cache for mixer in self.mixers for cache in mixer.caches)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*(weight for mixer in self.mixers for weight in mixer.weights), *self.mlp, *self.norms)

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The mixers that are attention modules."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    def flops(self, ranks: int) -> tuple[Flops, ...]:
        """Return the operations for each item of `caches`."""
        return tuple(each for mixer in self.mixers for each in mixer.flops(ranks))


class LayerGroup(NamedTuple):
    """A run of identical consecutive layers, from `first` to `last` inclusive (counted from 0).

    `caches` holds the caches of each layer: those of `layer`, with the lengths and dtypes of the workload, or the share
    of one device. It is empty if a layer keeps nothing, because it shares an earlier layer's cache or has no attention.
    """

    first: int
    last: int
    caches: tuple[Cache, ...]
    layer: Layer = Layer()

    @property
    def num_layers(self) -> int:
        return self.last - self.first + 1


def group_layers(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Group consecutive layers that are the same object. `layers` has every layer of the model, in order."""
    groups: list[LayerGroup] = []
    for number, layer in enumerate(layers):
        if groups and groups[-1].layer is layer:
            groups[-1] = groups[-1]._replace(last=number)
        else:
            groups.append(LayerGroup(number, number, layer.caches, layer))
    return tuple(groups)


def weights_of_layers(groups: Sequence[LayerGroup], around: Around) -> ModelWeights:
    """Return all weights of a model: one block for every distinct layer, and the weights outside the layers."""
    numbers: dict[int, tuple[Layer, list[int]]] = {}
    for group in groups:
        numbers.setdefault(id(group.layer), (group.layer, []))[1].extend(range(group.first, group.last + 1))
    blocks = (Block(around.prefix, layers, layer.weights) for layer, layers in numbers.values())
    return ModelWeights(around.embedding, around.tied, (*blocks, *around.blocks))
