"""Padding of experts in MXFP4, whose kernels need matrices of certain sizes: bytes on a device."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvcalc.engines.rounding import round_up
from kvcalc.memory.sharding import Bounds, stage_weights
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import LINEAR, ModelWeights
from kvcalc.records import NamedTuple

# Bytes of an element, with and without the scale of 32 of them (8 bits).
_STORED, _VALUE = Fraction(17, 32), Fraction(1, 2)


class Tile(NamedTuple):
    """The multiples to which a kernel rounds the hidden size and the intermediate size of a rank.

    `inputs_only` is whether only the inputs of a matrix are padded, and not the scales. `outputs` is the multiple of
    the hidden size where it is the output, if it is another one.
    """

    hidden: int
    intermediate: int
    inputs_only: bool = False
    outputs: int | None = None


def expert_padding(
    spec: ModelSpec, tile: Tile | None, dtype: str | None, ranks: int, spread: int, stages: Bounds
) -> tuple[tuple[str, int], ...]:
    """What `Engine.weight_padding` gives. None: a device whose kernels are not known."""
    weights, stated = weights_of(spec), spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "mxfp4" or dtype not in (None, "mxfp4"):
        return ()
    if weights is None or tile is None:
        return ()
    # Expert parallelism gives a rank whole experts.
    parts = stage_weights(weights, stages) if len(stages) > 1 else [weights]
    added = max(_added(part, weights.embedding.columns, 1 if spread > 1 else ranks, spread, tile) for part in parts)
    return (("padding of the experts", -(-added.numerator // added.denominator)),) if added else ()


def _added(weights: ModelWeights, hidden: int, ranks: int, spread: int, tile: Tile) -> Fraction:
    total = Fraction(0)
    for block in weights.blocks:
        for weight in block.weights:
            if weight.role == LINEAR and ".experts." in weight.name:
                goes_out = weight.name.endswith("down_proj")
                inner = -(-(weight.columns if goes_out else weight.rows) // ranks)
                multiple = (tile.outputs or tile.hidden) if goes_out else tile.hidden
                wide, tall = round_up(hidden, multiple), round_up(inner, tile.intermediate)
                if not tile.inputs_only:
                    more = (wide * tall - hidden * inner) * _STORED
                else:
                    more = (hidden * (tall - inner) if goes_out else inner * (wide - hidden)) * _VALUE
                total += len(block.numbers) * -(-weight.copies // spread) * more
    return total
