"""A model's layers, described once: what each caches, weighs and computes.

Everything counted anywhere is a sum over them: the cache's bytes, the weights, a device's shares, the bytes and
operations of a step, the parameters of the attention modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvcalc.model.caches import Cache
from kvcalc.model.mixers.attention import Attention, Flops
from kvcalc.model.tensors import Around, Block, ModelWeights, Weight


class Mixer(Protocol):
    """What mixes the tokens of a layer (`kvcalc.model.mixers`).

    `flops(ranks)` has operations for each of `caches`, on one of so many tensor-parallel ranks.
    """

    @property
    def caches(self) -> tuple[Cache, ...]: ...

    @property
    def weights(self) -> tuple[Weight, ...]: ...

    def flops(self, ranks: int) -> tuple[Flops, ...]: ...


class Layer(NamedTuple):
    """What one layer is made of: its mixers (most have one, Falcon-H1 two), its MLP or experts, its norms."""

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
        """Its mixers that are attention."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    def flops(self, ranks: int) -> tuple[Flops, ...]:
        """For each of `caches`."""
        return tuple(each for mixer in self.mixers for each in mixer.flops(ranks))


class LayerGroup(NamedTuple):
    """A run of consecutive layers, `first` to `last` inclusive (from 0), which are alike.

    `caches` is what each of them keeps: what `layer` says, with the workload's lengths and dtypes, or a device's share
    of it. Empty where a layer keeps nothing: it shares an earlier layer's cache, or has no attention.
    """

    first: int
    last: int
    caches: tuple[Cache, ...]
    layer: Layer = Layer()

    @property
    def num_layers(self) -> int:
        return self.last - self.first + 1


def group_layers(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Runs of the same layer, from every layer in order; equal layers are told by their identity."""
    groups: list[LayerGroup] = []
    for number, layer in enumerate(layers):
        if groups and groups[-1].layer is layer:
            groups[-1] = groups[-1]._replace(last=number)
        else:
            groups.append(LayerGroup(number, number, layer.caches, layer))
    return tuple(groups)


def weights_of_layers(groups: Sequence[LayerGroup], around: Around) -> ModelWeights:
    """All weights of a model: a block for every distinct layer, and what stands around them."""
    numbers: dict[int, tuple[Layer, list[int]]] = {}
    for group in groups:
        numbers.setdefault(id(group.layer), (group.layer, []))[1].extend(range(group.first, group.last + 1))
    blocks = (Block(around.prefix, found, layer.weights) for layer, found in numbers.values())
    return ModelWeights(around.embedding, around.tied, (*blocks, *around.blocks))
