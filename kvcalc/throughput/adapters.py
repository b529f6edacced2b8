"""The time of LoRA adapters in a step: the kernels that every adapted product launches, and what each adapter adds.

A server with LoRA runs two small products, A and B, beside every linear layer and both products of experts. Their
kernels are launched whether or not a request uses an adapter (`launches`). Each slot for an adapter is a part of their
grids, and each adapter in use is read and multiplied with its own tokens.
"""

from __future__ import annotations

from kvcalc.model.tensors import LINEAR, ModelWeights
from kvcalc.records import NamedTuple
from kvcalc.throughput.choices import distinct_experts
from kvcalc.throughput.launches import dense_products, is_output


class AdapterKernels(NamedTuple):
    """What an engine's kernels for adapters cost, besides reading.

    - launches: the kernels beside one product, in units of a small kernel.
    - slot_seconds: for each slot of the server, in one product.
    - adapter_seconds: for each adapter in use, in one product.
    """

    launches: int
    slot_seconds: float
    adapter_seconds: float


class Adapters(NamedTuple):
    """The adapters of a server on one rank: `slots` at a time, beside `products` products of all layers.

    `dense_bytes` are those of one adapter beside the dense layers, and `experts` the experts of a layer, those that a
    token reads, and the bytes of one adapter beside all of them.
    """

    kernels: AdapterKernels
    slots: int
    products: int
    dense_bytes: float
    experts: tuple[tuple[int, int, float], ...]

    @property
    def launches(self) -> int:
        """The kernels of a step, in units of a small kernel."""
        return self.products * self.kernels.launches

    def seconds(self, sequences: float, bytes_per_second: float) -> float:
        """The seconds of a step besides launching, if each request uses one of as many adapters as there are slots.

        `bytes_per_second` is the rate at which weights are read.
        """
        in_use = distinct_experts(self.slots, 1, sequences)
        read = self.dense_bytes + sum(
            size * distinct_experts(number, of_token, sequences / in_use) / number
            for number, of_token, size in self.experts
        )
        of_product = self.slots * self.kernels.slot_seconds + in_use * self.kernels.adapter_seconds
        return self.products * of_product + in_use * read / bytes_per_second


def adapted_products(weights: ModelWeights) -> int:
    """The products with adapters in a step: those of the layers, where experts count as two (up and down)."""
    return sum(
        len(block.numbers)
        * (dense_products(block) + sum(2 for w in block.weights if w.copies > 1 and is_output(w.name)))
        for block in weights.blocks
        if any(w.role == LINEAR for w in block.weights) and block.in_layers
    )
