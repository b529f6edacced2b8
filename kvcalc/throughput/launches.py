"""The fixed cost of a decode step's kernels, counted from the description of the layers.

A kernel that only starts and ends counts as one: a norm, a small matrix product, an activation. A kernel with a longer
fixed part counts as several. The time of one is `kernel_seconds` in constants.json, which is fitted for each engine and
kind of device. So a new kind of layer has a cost without a fit.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import LINEAR, NORM, ROUTER, Block, ModelWeights, Weight

# Projections of the same input are one product, as in every engine (QKV, gate and up). These read another input, and
# write to the hidden state.
_OUTPUTS = ("o_", "out", "down", "w2", "dense", "fc2", "c_proj")
_GATES = ("gate_proj", "gate_up", "up_proj", "w1", "fc1")
# Quantising the input, and the longer start of a product with scales: 5 us instead of 3 (kernel tables of
# aiconfigurator, commit 095f58a).
_QUANTIZED = 2
# Top-k, sorting and gathering the tokens, two grouped products, the activation and combining the results: 16 to 40 us
# besides the router, in the same tables. Experts in 8 or 4 bits also quantise two inputs.
_EXPERTS, _QUANTIZED_EXPERTS = 12, 4
# Adding the result of shared experts, on top of their products.
_SHARED = 2


def is_output(name: str) -> bool:
    """Whether the weight's product is added to the hidden state."""
    return name.rpartition(".")[2].startswith(_OUTPUTS)


def count_launches(spec: ModelSpec, weights: ModelWeights, is_quantized: Callable[[Block, Weight], bool]) -> int:
    """The kernels of one decode step, in units of a small kernel.

    `is_quantized(block, weight)` is whether the product with this weight also quantises its input.
    """
    launches = sum(group.num_layers * mixer.launches for group in spec.layers for mixer in group.layer.mixers)
    for block in weights.blocks:
        launches += len(block.numbers) * _of_layer(block, is_quantized)
    return launches


def dense_products(block: Block) -> int:
    """The products of one layer with weights that every token is multiplied with."""
    return len({_product(w) for w in block.weights if w.read and w.role == LINEAR and w.copies == 1})


def _product(weight: Weight) -> tuple[str, int, bool]:
    """What is the same for all weights whose products with one input are one product."""
    return weight.name.rpartition(".")[0], weight.columns, is_output(weight.name)


def _of_layer(block: Block, is_quantized: Callable[[Block, Weight], bool]) -> int:
    """The kernels of one layer of a block besides its mixers' own."""
    launches = 0
    products = set()
    for weight in block.weights:
        if not weight.read:
            continue
        if weight.role in (NORM, ROUTER):
            launches += 1
        elif weight.role == LINEAR and weight.copies > 1:
            if is_output(weight.name):
                launches += _EXPERTS + (_QUANTIZED_EXPERTS if is_quantized(block, weight) else 0)
        elif weight.role == LINEAR:
            parent, _, leaf = weight.name.rpartition(".")
            product = _product(weight)
            if product in products:
                continue
            products.add(product)
            launches += 1 + (_QUANTIZED if is_quantized(block, weight) else 0)
            if leaf.startswith(_GATES):
                launches += 1
            if is_output(weight.name) and "shared" in parent:
                launches += _SHARED
    return launches
