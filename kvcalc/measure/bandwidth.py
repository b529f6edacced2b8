"""The read bandwidth of the device, measured in the run it is compared with."""

from __future__ import annotations

from typing import Any

import torch

from kvcalc.measure.device import free_bytes
from kvcalc.measure.timing import time_call

# Far beyond any last-level cache (an H200 has 50 MB, large EPYC parts 1 GB in all, 32 MB to a core), so that the
# buffer is read from memory.
_BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30, "mps": 1 << 30}
_REPEATS = 7


def read_roof(device: torch.device) -> dict[str, Any]:
    """The best rate at which this device has been seen to read memory: the `roof` part of a document.

    Two plain reductions are tried, each `_REPEATS` times; the fastest single pass counts, because a roof is what the
    hardware can do. The buffer is smaller where memory is short.
    """
    size = min(_BUFFER_BYTES[device.type], max(64 << 20, free_bytes(device) // 4)) & ~0xFFF
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    matrix, vector = buffer.view(-1, 1024), torch.ones(1024, dtype=torch.float32, device=device)
    best = min(
        time_call(device, call) for call in (buffer.sum, lambda: torch.mv(matrix, vector)) for _ in range(_REPEATS)
    )
    return {"read_bytes_per_second": size / best, "buffer_bytes": size}
