"""Turn failures during a run into one-line errors: out of memory, a lost device, NaN in the output.

The run's memory is always freed first. Otherwise, the exception keeps its frames alive, and the frames keep the weights
and caches.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from kvcalc.errors import KvcalcError, RunError
from kvcalc.measure.devices.device import release
from kvcalc.units import format_size

# torch raises these as plain RuntimeErrors on some devices.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
              "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")  # fmt: skip
_LOST = ("CUDA error", "CUDA driver error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "MPS backend",
         "device-side assert", "uncorrectable ECC", "UR_RESULT_ERROR")  # fmt: skip
_LOST_RANK = ("NCCL", "gloo/")


@contextmanager
def faults(device: torch.device) -> Iterator[None]:
    """Turn torch's exceptions inside the block into a RunError (exit 1) with one line.

    For any exception, including Ctrl-C, the tensors of the block are freed.
    """
    try:
        yield
    except BaseException as error:
        fault = explain(error)
        forget(error)
        # A lost device cannot free memory.
        with suppress(RuntimeError):
            release(device)
        if fault is None:
            raise
        raise fault from error


def explain(error: BaseException) -> RunError | None:
    """The RunError for an exception from torch. None if it is not a known failure, or is already a KvcalcError."""
    if isinstance(error, KvcalcError) or not isinstance(error, (RuntimeError, MemoryError)):
        return None
    text = str(error)
    line = first_line(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in text for sign in _NO_MEMORY):
        return RunError(
            f"out of memory{_wanted(text)}", "use fewer layers (--layers), a smaller batch or a shorter context"
        )
    if any(sign in text for sign in _LOST_RANK):
        return RunError(f"lost another rank: {line}", "see that rank's own error message")
    if isinstance(error, torch.AcceleratorError) or any(sign in text for sign in _LOST):
        return RunError(f"the device failed: {line}", "see the driver's log; a new process may work again")
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message.

    A line that ends with a colon only introduces the next one (torch.compile: "backend='inductor' raised:").
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    last = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1])


def check_finite(output: Tensor, what: str) -> None:
    """Raise RunError (exit 1) if `output` has NaN or infinities, because the times of such a run are meaningless."""
    wrong = output.numel() - int(torch.isfinite(output).sum())
    if wrong:
        raise RunError(
            f"{what}: {wrong:,} of {output.numel():,} outputs are NaN or infinite",
            "fp16 overflows above 65,504; try --dtype bf16" if output.dtype == torch.float16 else None,
        )


def _wanted(text: str) -> str:
    """The requested size, if the message has it. CPU messages have bytes, and CUDA messages have a size."""
    match = re.search(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", text, re.IGNORECASE)
    if match is None:
        return ""
    return f": cannot allocate {format_size(int(match[1])) if match[2] == 'bytes' else f'{match[1]} {match[2]}'} more"


def forget(error: BaseException, *, is_over: bool = False) -> None:
    """Clear the local variables in the frames of `error` and of its causes.

    With `is_over`, its tracebacks go too. They hold the frames that still run, and torch's compiler keeps errors.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        if is_over:
            cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
