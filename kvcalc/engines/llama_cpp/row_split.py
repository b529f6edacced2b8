"""Where llama.cpp puts each weight with --split-mode row: the rows of matrices are divided among the devices.

Source: llama.cpp before pull request 24216 (June 2026), which removed it from the CUDA backend: make_gpu_buft_list
(src/llama-model.cpp), and get_row_split, get_row_rounding and ggml_backend_cuda_device_supports_op
(ggml/src/ggml-cuda/ggml-cuda.cu).

- A matrix of two dimensions that an activation is multiplied with is divided at cumulative shares, rounded down to the
  tile of a kernel. If the device of its layer would get no row of it, it stays there whole.
- Everything else is where the layer is: norms, biases, routed experts and the matrices of MLA's heads, which have three
  dimensions, and the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from kvcalc.model.tensors import HEAD, LINEAR, ROUTER, Block, ModelWeights, Weight

_MATRICES = (LINEAR, HEAD, ROUTER)


def tile_rows(device_class: str | None) -> int:
    """The rows to which a matrix is rounded (get_mmq_y_host, ggml-cuda/mmq.cuh). Only GPUs before Volta have 64."""
    return 64 if device_class in ("maxwell", "pascal") else 128


def rows_on_devices(rows: int, shares: Sequence[Fraction | int], tile: int) -> list[int]:
    """The rows of a matrix on each device. `shares` has one number for each. The engine computes with 32-bit floats."""
    total = _float32(sum(map(float, shares)))
    ends = [_float32(_float32(float(end)) / total) for end in accumulate(shares)][:-1]
    bounds = [0, *(int(_float32(rows * end)) // tile * tile for end in ends), rows]
    return [high - low for low, high in pairwise(bounds)]


def divide_rows(
    parts: Sequence[ModelWeights], shares: Sequence[Fraction | int], tile: int
) -> tuple[list[ModelWeights], list[int]]:
    """The weights on each device without the embedding, and the rows of a tied head on each.

    `parts` are the weights of each device's layers, as --split-mode layer places them. Devices after the last of them
    have no layers, but rows.
    """
    blocks: list[list[Block]] = [[] for _ in shares]
    head = [0] * len(shares)
    for own, part in enumerate(parts):
        for block in part.blocks:
            placed = [_on_devices(weight, own, shares, tile) for weight in block.weights]
            for device, kept in enumerate(blocks):
                held = tuple(weights[device] for weights in placed if weights[device].parameters)
                if held:
                    kept.append(Block(block.prefix, block.numbers, held))
        if part.embedding.rows:
            head = [one.rows for one in _on_devices(part.embedding._replace(role=HEAD), own, shares, tile)]
    none = parts[0].embedding._replace(rows=0)
    return [ModelWeights(none, False, tuple(held)) for held in blocks], head


def _on_devices(weight: Weight, own: int, shares: Sequence[Fraction | int], tile: int) -> list[Weight]:
    """The part of a weight on each device. `own` is the device of its layer."""
    rows = [0] * len(shares)
    rows[own] = weight.rows
    if weight.role in _MATRICES and weight.copies == 1 and weight.columns > 1:
        divided = rows_on_devices(weight.rows, shares, tile)
        rows = divided if divided[own] else rows
    return [
        weight._replace(rows=held, bias=weight.bias if device == own else 0, kv_heads=0, kv_rows=0)
        for device, held in enumerate(rows)
    ]


def _float32(number: float) -> float:
    (found,) = struct.unpack("f", struct.pack("f", number))
    return float(found)
