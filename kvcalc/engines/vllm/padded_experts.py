"""What vLLM adds to experts in MXFP4, whose kernels need matrices of certain sizes: bytes on a device.

Source: mxfp4_round_up_hidden_size_and_intermediate_size and the order of the backends (fused_moe/oracle/mxfp4.py, vLLM
0.33.0). gpt-oss's matrices of 2,880 become 3,072 x 2,944 with Marlin: 13.72 GiB of gpt-oss-20b are loaded on an A100,
and 65.97 GiB of gpt-oss-120b (vllm-project/vllm#23278), instead of 12.82 and 60.77. On Hopper, Triton's layout pads the
inputs of the values only (hopper_value.py, triton_kernels): 64.38 GiB (vllm-project/vllm#33155).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from kvcalc.engines.rounding import round_up
from kvcalc.memory.sharding import Bounds, stage_weights
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.tensors import LINEAR, ModelWeights
from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import Gpu

# Bytes of an element, with and without the scale of 32 of them (8 bits).
_STORED, _VALUE = Fraction(17, 32), Fraction(1, 2)


class Tile(NamedTuple):
    """The multiples to which a kernel rounds the hidden size and the intermediate size of a rank.

    `inputs_only` is whether only the inputs of a matrix are padded, and not the scales.
    """

    hidden: int
    intermediate: int
    inputs_only: bool = False


_MARLIN = _TRTLLM = Tile(256, 128)
_BY_CLASS = {
    "turing": _MARLIN, "ampere": _MARLIN, "ada": _MARLIN, "blackwell-rtx": _MARLIN, "blackwell": _TRTLLM,
    "hopper": Tile(256, 256, inputs_only=True),
}  # fmt: skip
_OF_AMD = Tile(256, 256)


def expert_padding(
    spec: ModelSpec, gpu: Gpu, dtype: str | None, ranks: int, spread: int, stages: Bounds
) -> tuple[tuple[str, int], ...]:
    """What `Engine.weight_padding` gives."""
    weights, stated = weights_of(spec), spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "mxfp4" or dtype not in (None, "mxfp4"):
        return ()
    tile = _OF_AMD if gpu.vendor == "AMD" else _BY_CLASS.get(gpu.device_class or "")
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
                wide, tall = round_up(hidden, tile.hidden), round_up(inner, tile.intermediate)
                if not tile.inputs_only:
                    more = (wide * tall - hidden * inner) * _STORED
                else:
                    more = (hidden * (tall - inner) if goes_out else inner * (wide - hidden)) * _VALUE
                total += len(block.numbers) * -(-weight.copies // spread) * more
    return total
