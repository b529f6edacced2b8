"""What goes wrong while a run is on, as one line: memory that runs out, a device that is lost, outputs of NaN.

Whatever is raised, the run's memory is freed first: an exception keeps the frames it came through, and they the
weights and caches.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from kvcalc.errors import KvcalcError, RunError
from kvcalc.measure.device import release
from kvcalc.units import format_size

# torch raises these as plain RuntimeErrors on some devices and in older releases.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_LOST = ("CUDA error", "CUDA driver error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "MPS backend",
         "device-side assert", "uncorrectable ECC")  # fmt: skip
_LOST_RANK = ("NCCL", "gloo/")


@contextmanager
def faults(device: torch.device) -> Iterator[None]:
    """Within the block, what torch raises becomes a RunError (exit 1) of one line; and whatever is raised, Ctrl-C
    included, the block's tensors are freed."""
    try:
        yield
    except BaseException as error:
        fault = explain(error)
        _forget(error)
        # A device that is lost can free nothing.
        with suppress(RuntimeError):
            release(device)
        if fault is None:
            raise
        raise fault from error


def explain(error: BaseException) -> RunError | None:
    """The fault behind what torch raised; None where it is none of those known, or already explained."""
    if isinstance(error, KvcalcError) or not isinstance(error, (RuntimeError, MemoryError)):
        return None
    text = str(error)
    line = first_line(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(sign in text for sign in _NO_MEMORY):
        return RunError(
            f"out of memory{_wanted(text)}", "run fewer layers (--layers), a smaller batch or a shorter context"
        )
    if any(sign in text for sign in _LOST_RANK):
        return RunError(f"lost another rank: {line}", "what stopped it stands in its own lines")
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if (accelerator_error and isinstance(error, accelerator_error)) or any(sign in text for sign in _LOST):
        return RunError(f"the device failed: {line}", "its driver's log says why; a new process may find it again")
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_finite(output: Tensor, what: str) -> None:
    """Raise RunError (exit 1) where `output` holds NaN or infinity: its times would be those of a broken run."""
    wrong = output.numel() - int(torch.isfinite(output).sum())
    if wrong:
        raise RunError(
            f"{what}: {wrong:,} of {output.numel():,} outputs are NaN or infinite",
            "fp16 overflows beyond 65,504, bf16 does not: --dtype bf16" if output.dtype == torch.float16 else None,
        )


def _wanted(text: str) -> str:
    """How much was asked for, where the message says so: CPUs name bytes, CUDA a size."""
    found = re.search(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]iB)", text, re.IGNORECASE)
    if found is None:
        return ""
    return f": {format_size(int(found[1])) if found[2] == 'bytes' else f'{found[1]} {found[2]}'} more was not to be had"


def _forget(error: BaseException | None) -> None:
    """Drop the locals of the frames that ended with `error`, and with what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
