"""The padding of weights, whose kernels need matrices of certain sizes: bytes on a device."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvcalc.engines.rounding import round_up
from kvcalc.engines.starts import BY_INPUTS, is_nvidia, quantized_matrices, rules_of
from kvcalc.memory.sharding import Bounds, stage_weights
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import LINEAR, ModelWeights
from kvcalc.records import NamedTuple
from kvcalc.releases import Release
from kvcalc.throughput.hardware import Gpu

# Bytes of an element of MXFP4, with and without the scale of 32 of them (8 bits).
_STORED, _VALUE = Fraction(17, 32), Fraction(1, 2)


class Tile(NamedTuple):
    """The multiples to which a kernel for experts in MXFP4 rounds the hidden size and a rank's intermediate size.

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
    """What `Engine.weight_padding` gives for experts in MXFP4. None: a device whose kernels are not known."""
    stated = spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "mxfp4" or dtype not in (None, "mxfp4"):
        return ()
    parts = [] if tile is None else _stages(spec, stages)
    # Expert parallelism gives a rank whole experts.
    divided = 1 if spread > 1 else ranks
    added = max((_of_experts(part, part.embedding.columns, divided, spread, tile) for part in parts if tile), default=0)
    return (("padding of the experts", -(-added.numerator // added.denominator)),) if added else ()


def _of_experts(weights: ModelWeights, hidden: int, ranks: int, spread: int, tile: Tile) -> Fraction:
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


def block_padding(
    spec: ModelSpec, engine: str, release: Release | None, gpu: Gpu, ranks: int, stages: Bounds
) -> tuple[tuple[str, int], ...]:
    """The same for MLPs in fp8 that devices divide, so that each has whole blocks of one scale (`starts.Rules`).

    Source: DeepseekV4MLP (models/deepseek_v4/nvidia/model.py), _padded_mlp_size (models/dots3_note/nvidia/model.py) and
    _get_block_fp8_mlp_padded_intermediate_size (model_executor/models/bailing_moe_v3.py), vLLM 0.33.0.
    """
    ends = rules_of(engine, release).ends_unchecked(spec.model_type, is_nvidia(gpu))
    if not ends or ranks == 1:
        return ()
    added = max((_of_blocks(spec, part, ends, ranks) for part in _stages(spec, stages)), default=0)
    return (("padding of fp8 blocks", added),) if added else ()


def _of_blocks(spec: ModelSpec, weights: ModelWeights, ends: tuple[str, ...], ranks: int) -> int:
    total = 0
    for weight, form, count in quantized_matrices(spec, weights):
        if form.block is not None and weight.copies == 1 and f".{weight.name}".endswith(ends):
            if weight.name.endswith(BY_INPUTS):
                padded = weight.rows, round_up(-(-weight.columns // ranks), form.block[1])
            else:
                padded = round_up(-(-weight.rows // ranks), form.block[0]), weight.columns
            part = weight.on_rank(ranks)
            total += count * (form.bytes_of(*padded) - form.bytes_of(part.rows, part.columns))
    return total


def _stages(spec: ModelSpec, stages: Bounds) -> list[ModelWeights]:
    """The weights of each pipeline stage. Empty if they are not known."""
    weights = weights_of(spec)
    if weights is None:
        return []
    return stage_weights(weights, stages) if len(stages) > 1 else [weights]
