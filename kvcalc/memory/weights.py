"""Parameters of a model, and the bytes they take in a dtype or as its config says they are quantised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvcalc.memory.dtypes import Dtype
from kvcalc.model.tensors import EMBEDDING, LINEAR, LOOKUP, ModelWeights, Weight

if TYPE_CHECKING:
    from kvcalc.memory.quantization.schemes import Scheme


class Parameters(NamedTuple):
    """How many there are, how many one token's step reads, and how many are the input embedding.

    A step reads everything but the tables it takes one row of (the input embedding, unless it is the output head too;
    learned positions; per-layer embeddings), and of the experts those the token is sent to. Of an encoder-decoder it
    reads the decoder alone.
    """

    total: int
    active_per_token: int
    input_embedding: int


WeightBytes = tuple[int, int]
"""The bytes of all weights, and of those one token's step reads."""


def count_parameters(weights: ModelWeights) -> Parameters:
    """Every parameter once, a tied embedding too."""
    total = active = 0
    for block in weights.blocks:
        total += len(block.numbers) * sum(weight.parameters for weight in block.weights)
        active += len(block.numbers) * sum(w.read_parameters for w in block.weights if w.role != LOOKUP)
    table = weights.embedding.parameters
    return Parameters(total + table, active + (table if weights.tied else 0), table)


def plain_bytes(weights: ModelWeights, base: Dtype, linear: Dtype | None = None) -> WeightBytes:
    """All weights in `base`, a dtype without blocks; with `linear`, the matrices of linear layers in that one.

    Embedding, output head, norms, routers and biases are never in `linear`. Blocks of a format run along a row, and the
    last may be part-filled.
    """
    return _sum(weights, base, matrices(weights, base, linear))


def quantized_bytes(weights: ModelWeights, base: Dtype, scheme: Scheme) -> WeightBytes:
    """Weights as `scheme` stores them, scales included; in `base` where it leaves them alone. Biases stay in `base`."""
    return _sum(weights, base, matrices(weights, base, scheme=scheme), scheme)


def matrices(
    weights: ModelWeights, base: Dtype, linear: Dtype | None = None, scheme: Scheme | None = None
) -> Iterator[tuple[Weight, int, int]]:
    """Every weight but the input embedding, the number of layers that have it, and the bytes of one of its copies.

    In `base`; with `linear` or `scheme` as `plain_bytes` and `quantized_bytes` say.
    """
    for block in weights.blocks:
        # Where no pattern tells layers apart, the first of a block stands for all.
        by_layer = scheme is not None and scheme.by_layer
        times = 1 if by_layer else len(block.numbers)
        for number in block.numbers if by_layer else block.numbers[:1]:
            prefix = "" if scheme is None else block.prefix.format(number)
            for weight in block.weights:
                form = None if scheme is None else scheme.format_of(prefix + weight.name, weight.role)
                if form is not None:
                    one = form.bytes_of(weight.rows, weight.columns)
                elif linear is not None and weight.role == LINEAR:
                    one = weight.rows * -(-weight.columns // linear.block_elements) * linear.block_bytes
                else:
                    one = weight.rows * weight.columns * base.block_bytes
                yield weight, times, one + weight.bias * base.block_bytes


def embedding_bytes(weights: ModelWeights, base: Dtype, scheme: Scheme | None = None) -> int:
    """The input embedding's bytes."""
    if scheme is None or scheme.embedding is None:
        return weights.embedding.parameters * base.block_bytes
    form = scheme.embedding[weights.tied]
    return form.bytes_of(weights.embedding.rows, weights.embedding.columns)


def _sum(
    weights: ModelWeights, base: Dtype, counted: Iterable[tuple[Weight, int, int]], scheme: Scheme | None = None
) -> WeightBytes:
    total = active = 0
    for weight, layers, one in counted:
        total += layers * weight.copies * one
        active += layers * _read(weight) * one
    table = embedding_bytes(weights, base, scheme)
    return total + table, active + (table if weights.tied else 0)


def _read(weight: Weight) -> int:
    return 0 if weight.role in (LOOKUP, EMBEDDING) else min(weight.read, weight.copies)
