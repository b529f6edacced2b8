"""The two roofs of the device, measured in the run they are compared with: reading memory, and multiplying matrices."""

from __future__ import annotations

from typing import Any

import torch

from kvcalc.measure.device import free_bytes
from kvcalc.measure.timing import Effort, time_call

# Far beyond any last-level cache (an H200 has 50 MB, large EPYC parts 1 GB in all, 32 MB to a core), so that the
# buffer is read from memory.
_BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30, "mps": 1 << 30}
_REPEATS = 7
# Square matrices: large enough for the device's best, small enough for a second.
_MATRIX = {"cuda": 8192, "cpu": 1024, "mps": 2048}
_MATRIX_SECONDS = 0.2


def read_roof(device: torch.device, dtype: torch.dtype, effort: Effort) -> dict[str, Any]:
    """The best rates at which this device has been seen to read memory, and to multiply: the `roof` of a document.

    Two plain reductions are tried, each `_REPEATS` times; the fastest single pass counts, because a roof is what the
    hardware can do. The buffer is smaller where memory is short. Matrices are of the `dtype` a run computes in.
    """
    size = effort.read_bytes or min(_BUFFER_BYTES[device.type], max(64 << 20, free_bytes(device) // 4)) & ~0xFFF
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    matrix, vector = buffer.view(-1, 1024), torch.ones(1024, dtype=torch.float32, device=device)
    best = min(
        time_call(device, call) for call in (buffer.sum, lambda: torch.mv(matrix, vector)) for _ in range(_REPEATS)
    )
    return {
        "read_bytes_per_second": size / best,
        "buffer_bytes": size,
        "matmul_flop_per_second": _matmul_rate(device, dtype, effort.matrix_width or _MATRIX[device.type]),
        "matmul_dtype": str(dtype).removeprefix("torch."),
    }


def _matmul_rate(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """FLOP per second of the best of some products of two square matrices; on a CPU in fp32 too, as prefill runs there
    where 16-bit products are emulated."""
    best = float("inf")
    for used in (torch.float32, dtype) if device.type == "cpu" else (dtype,):
        a, b = (torch.full((width, width), 0.5, dtype=used, device=device) for _ in range(2))
        spent = 0.0
        for _ in range(_REPEATS):
            taken = time_call(device, lambda: a @ b)  # noqa: B023 - called at once
            best, spent = min(best, taken), spent + taken
            if spent > _MATRIX_SECONDS:
                break
    return 2.0 * width**3 / best
