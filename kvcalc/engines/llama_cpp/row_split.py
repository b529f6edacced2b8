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

from kvcalc.engines.account import DividedRows
from kvcalc.engines.llama_cpp.settings import NO_ROWS, Settings
from kvcalc.model.spec import ModelSpec, has_states, weights_of
from kvcalc.model.tensors import HEAD, LINEAR, ROUTER, Block, ModelWeights, Weight
from kvcalc.throughput.hardware import Gpu

_MATRICES = (LINEAR, HEAD, ROUTER)
_BACKENDS = ("NVIDIA", "AMD")


def tile_rows(device_class: str | None) -> int:
    """The rows to which a matrix is rounded (get_mmq_y_host, ggml-cuda/mmq.cuh). Only GPUs before Volta have 64."""
    return 64 if device_class in ("maxwell", "pascal") else 128


def rows_on_devices(rows: int, shares: Sequence[Fraction | int], tile: int) -> list[int]:
    """The rows of a matrix on each device. `shares` has one number for each. The engine computes with 32-bit floats."""
    total = _float32(sum(map(float, shares)))
    ends = [_float32(_float32(float(end)) / total) for end in accumulate(shares)][:-1]
    bounds = [0, *(int(_float32(rows * end)) // tile * tile for end in ends), rows]
    return [high - low for low, high in pairwise(bounds)]


def why_not_divided(spec: ModelSpec, gpu: Gpu, chosen: Settings) -> str | None:
    """Why the rows of a model's matrices are not divided, or None if they are."""
    if gpu.vendor not in _BACKENDS:
        return f"--split-mode row is not modelled for {gpu.name}; the cache is as with layer"
    if not chosen.is_before(NO_ROWS):
        return (
            "llama.cpp has no --split-mode row on these devices since pull request 24216 of June 2026 (device CUDA0 "
            "does not support split buffers); --before-pull 24216 counts an older build"
        )
    if spec.gguf is not None or weights_of(spec) is None:
        return f"--split-mode row: the matrices of {spec.name} are not counted one by one"
    if has_states(spec):
        return f"--split-mode row is not modelled for the recurrent layers of {spec.name}"
    if spec.attention.is_latent:
        return f"--split-mode row is not modelled for MLA, whose matrices {spec.name} has one for each head"
    return None


def divide_rows(parts: Sequence[ModelWeights], shares: Sequence[Fraction | int], tile: int) -> DividedRows:
    """The weights on each device without the embedding, and the rows of a tied head on each.

    `parts` are the weights of each device's layers, as --split-mode layer places them. Devices after the last of them
    have no layers, but rows.
    """
    blocks: list[list[Block]] = [[] for _ in shares]
    head = [0] * len(shares)
    for number, part in enumerate(parts):
        for block in part.blocks:
            placed = [_on_devices(weight, number, shares, tile) for weight in block.weights]
            for device, kept in enumerate(blocks):
                held = tuple(weights[device] for weights in placed if weights[device].parameters)
                if held:
                    kept.append(Block(block.prefix, block.numbers, held))
        if part.embedding.rows:
            head = [matrix.rows for matrix in _on_devices(part.embedding._replace(role=HEAD), number, shares, tile)]
    none = parts[0].embedding._replace(rows=0)
    return DividedRows([ModelWeights(none, False, tuple(held)) for held in blocks], head)


def _on_devices(weight: Weight, number: int, shares: Sequence[Fraction | int], tile: int) -> list[Weight]:
    """The part of a weight on each device. `number` is the device of its layer."""
    rows = [0] * len(shares)
    rows[number] = weight.rows
    if weight.role in _MATRICES and weight.copies == 1 and weight.columns > 1:
        divided = rows_on_devices(weight.rows, shares, tile)
        rows = divided if divided[number] else rows
    return [
        weight._replace(rows=held, bias=weight.bias if device == number else 0, kv_heads=0, kv_rows=0)
        for device, held in enumerate(rows)
    ]


def _float32(number: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", number))
    return float(rounded)
