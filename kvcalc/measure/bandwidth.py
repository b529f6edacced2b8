"""The device's two roofs, for reading memory and multiplying matrices. They are measured in every run."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from kvcalc.measure.devices.device import free_bytes, release
from kvcalc.measure.devices.timing import Effort, summarize, time_calls
from kvcalc.measure.layers.build import fill, random_block

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Much larger than any last-level cache (an H200 has 60 MB; large EPYC parts have 1 GB in total, 32 MB per core), so
# that the buffer is read from memory.
_BUFFER_BYTES = {"cuda": 4 << 30, "cpu": 1 << 30, "mps": 1 << 30, "xpu": 4 << 30}
# Seconds for each way of reading and each matrix, at the start and after a run.
_REPEATS, _SECONDS, _SECONDS_AGAIN = 7, 0.5, 0.15
# The widths of square matrices: large enough for the device's best rate, small enough to take less than a second. A CPU
# that is shared reaches less on small ones, because its threads wait for each other. A prompt has large ones.
_MATRIX = {"cuda": (8192,), "cpu": (1024, 2048), "mps": (2048,), "xpu": (8192,)}
_MATRIX_REPEATS = 25


def read_roof(device: torch.device, dtype: torch.dtype, effort: Effort) -> documents.MeasureRoof:
    """The measured rates of this device for reading memory and for multiplying: the `roof` of a document.

    For reading, two plain reductions run `_REPEATS` times each, and the fastest single pass counts. So it does for
    multiplying on a CPU. On a GPU it is the median, because a GPU that multiplies for long lowers its clock. Both use
    random numbers: on constants a GPU draws less power and is faster. Matrices have the `dtype` in which the run
    computes. The buffer is smaller if there is little memory, and it is given back.
    """
    size = effort.read_bytes or min(_BUFFER_BYTES[device.type], max(64 << 20, free_bytes(device) // 4)) & ~0xFFF
    return _measured(device, dtype, size, effort, _SECONDS)


def read_again(roof: documents.MeasureRoof, device: torch.device, dtype: torch.dtype, effort: Effort) -> None:
    """After a run: raise `roof` to the rates of now, if they are higher.

    Other programs slow a CPU for seconds. Without this, a run that they left alone would be above its roof.
    """
    now = _measured(device, dtype, roof["buffer_bytes"], effort, _SECONDS_AGAIN)
    roof["read_bytes_per_second"] = max(roof["read_bytes_per_second"], now["read_bytes_per_second"])
    _raise_to(roof, now["matmul_flop_per_second"], now["matmul_dtype"])


def multiply_again(roof: documents.MeasureRoof, layers: Iterable[nn.Module], rows: int, effort: Effort) -> None:
    """After a prompt ran above its roof: raise `roof` to the fastest of the prompt's own products, if that is higher.

    No prompt is faster than all of its products. They may be larger than the matrices of the roof, and a GPU begins
    with a higher clock than it holds. `layers` ran the prompt, in pieces of `rows` tokens of all sequences.
    """
    linears = (module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear))
    weights = {module.weight.shape: module.weight for module in linears}.values()
    for weight in weights:
        device = weight.device
        x = torch.empty(rows, weight.shape[1], device=device).uniform_(-1, 1)
        for used in {torch.float32, weight.dtype} if device.type == "cpu" else {weight.dtype}:
            a, b = x.to(used), weight.to(used)
            taken = time_calls(
                device, partial(F.linear, a, b), _REPEATS, most_seconds=_SECONDS / len(weights), effort=effort
            )
            _raise_to(roof, 2.0 * rows * weight.numel() / min(taken.seconds), _name(used))


def _raise_to(roof: documents.MeasureRoof, rate: float, dtype: str) -> None:
    if rate > roof["matmul_flop_per_second"]:
        roof["matmul_flop_per_second"], roof["matmul_dtype"] = rate, dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measured(
    device: torch.device, dtype: torch.dtype, size: int, effort: Effort, seconds: float
) -> documents.MeasureRoof:
    best = _read_seconds(device, size, effort, seconds)
    rate, fastest = _matmul_rate(device, dtype, effort, seconds / 2)
    release(device)
    return {
        "read_bytes_per_second": size / best,
        "buffer_bytes": size,
        "matmul_flop_per_second": rate,
        "matmul_dtype": _name(fastest),
    }


def _read_seconds(device: torch.device, size: int, effort: Effort, most_seconds: float) -> float:
    """The seconds of the fastest pass over a buffer of `size` bytes."""
    buffer = torch.empty(size // 4, dtype=torch.float32, device=device)
    fill(buffer, random_block(0, device))
    matrix, vector = buffer.view(-1, 1024), torch.ones(1024, dtype=torch.float32, device=device)
    calls = (buffer.sum, lambda: torch.mv(matrix, vector))
    return min(
        min(time_calls(device, call, _REPEATS, most_seconds=most_seconds, effort=effort).seconds) for call in calls
    )


def _matmul_rate(
    device: torch.device, dtype: torch.dtype, effort: Effort, most_seconds: float
) -> tuple[float, torch.dtype]:
    """FLOP per second, and dtype, of the fastest product of a square matrix and a weight laid out like a projection's.

    On a CPU, fp32 is tried too, because prefill runs in fp32 if the CPU emulates 16-bit products. Emulated products are
    up to a hundred times slower, so a dtype that is slow on small matrices is not tried on larger ones.
    """
    is_cpu = device.type == "cpu"
    widths = (effort.matrix_width,) if effort.matrix_width else _MATRIX[device.type]
    dtypes = {torch.float32, dtype} if is_cpu else {dtype}
    best = 0.0, dtype
    for width in widths:
        rates: dict[torch.dtype, float] = {}
        for used in dtypes:
            x, weight = (torch.empty(width, width, device=device).uniform_(-1, 1).to(used) for _ in range(2))
            taken = time_calls(
                device, partial(F.linear, x, weight), _MATRIX_REPEATS, most_seconds=most_seconds, effort=effort
            )
            rates[used] = 2.0 * float(width) ** 3 / summarize(taken.seconds)["min" if is_cpu else "p50"]
        best = max(best, *((rate, used) for used, rate in rates.items()), key=itemgetter(0))
        dtypes = {used for used, rate in rates.items() if rate > max(rates.values()) / 2}
    return best
