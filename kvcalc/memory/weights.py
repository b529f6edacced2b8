"""A model's parameters, and their bytes in a dtype or with the quantisation that its config names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvcalc.memory.dtypes import Dtype
from kvcalc.model.tensors import EMBEDDING, LINEAR, LOOKUP, ModelWeights, Weight
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme


class Parameters(NamedTuple):
    """The number of parameters: all of them, those one token's step reads, and those of the input embedding.

    A step does not read the tables from which it takes one row (the input embedding unless it is also the output head,
    learned positions, per-layer embeddings). It reads only the experts the token is sent to. In an encoder-decoder
    model it reads only the decoder.
    """

    total: int
    active_per_token: int
    input_embedding: int


WeightBytes = tuple[int, int]
"""The bytes of all weights, and the bytes of the weights that one token's step reads."""


def count_parameters(weights: ModelWeights) -> Parameters:
    """Count every parameter once, including a tied embedding."""
    total = active = 0
    for block in weights.blocks:
        total += len(block.numbers) * sum(weight.parameters for weight in block.weights)
        active += len(block.numbers) * sum(w.read_parameters for w in block.weights if w.role != LOOKUP)
    table = weights.embedding.parameters
    return Parameters(total + table, active + (table if weights.tied else 0), table)


def plain_bytes(weights: ModelWeights, base: Dtype, linear: Dtype | None = None) -> WeightBytes:
    """The bytes of all weights in `base`, a dtype without blocks. With `linear`, the matrices of linear layers use it.

    The embedding, the output head, norms, routers and biases never use `linear`. Blocks run along a row, and the last
    block of a row may be partly filled.
    """
    return _sum(weights, base, matrices(weights, base, linear))


def quantized_bytes(weights: ModelWeights, base: Dtype, scheme: Scheme) -> WeightBytes:
    """The bytes of the weights as `scheme` stores them, including scales.

    Biases, and weights that the scheme does not quantise, stay in `base`.
    """
    return _sum(weights, base, matrices(weights, base, scheme=scheme), scheme)


def matrices(
    weights: ModelWeights, base: Dtype, linear: Dtype | None = None, scheme: Scheme | None = None
) -> Iterator[tuple[Weight, int, int, str]]:
    """Every weight except the input embedding, the number of layers that have it, the bytes of one of its copies, and
    the name of the stored type of its matrix.

    `base`, `linear` and `scheme` have the same meaning as in `plain_bytes` and `quantized_bytes`.
    """
    for block in weights.blocks:
        # If no pattern distinguishes layers, the first layer of a block represents all of them.
        by_layer = scheme is not None and scheme.by_layer
        bias_bytes = base.block_bytes if scheme is None else scheme.bias_bytes or base.block_bytes
        times = 1 if by_layer else len(block.numbers)
        for number in block.numbers if by_layer else block.numbers[:1]:
            prefix = "" if scheme is None else block.prefix.format(number)
            for weight in block.weights:
                form = None if scheme is None else scheme.format_of(prefix + weight.name, weight.role)
                if form is not None:
                    num_bytes, name = form.bytes_of(weight.rows, weight.columns), form.name
                elif linear is not None and weight.role == LINEAR:
                    num_bytes = weight.rows * -(-weight.columns // linear.block_elements) * linear.block_bytes
                    name = linear.name
                else:
                    num_bytes, name = weight.rows * weight.columns * base.block_bytes, base.name
                yield weight, times, num_bytes + weight.bias * bias_bytes, name


def embedding_bytes(weights: ModelWeights, base: Dtype, scheme: Scheme | None = None) -> int:
    """The input embedding's bytes."""
    if scheme is None or scheme.embedding is None:
        return weights.embedding.parameters * base.block_bytes
    form = scheme.embedding[weights.tied]
    return form.bytes_of(weights.embedding.rows, weights.embedding.columns)


def _sum(
    weights: ModelWeights, base: Dtype, counted: Iterable[tuple[Weight, int, int, str]], scheme: Scheme | None = None
) -> WeightBytes:
    total = active = 0
    for weight, layers, num_bytes, _ in counted:
        total += layers * weight.copies * num_bytes
        active += layers * _read(weight) * num_bytes
    table = embedding_bytes(weights, base, scheme)
    return total + table, active + (table if weights.tied else 0)


def _read(weight: Weight) -> int:
    return 0 if weight.role in (LOOKUP, EMBEDDING) else min(weight.read, weight.copies)
