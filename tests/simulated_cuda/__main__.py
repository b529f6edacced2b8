"""`python -m tests.simulated_cuda MODULE ARGUMENTS...`: run a module on a simulated device, with small roofs."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

import pytest
import torch

from tests.measure.quick import quicken
from tests.simulated_cuda.kernels import Interpreted
from tests.simulated_cuda.runtime import simulated_cuda

# kvcalc's Triton kernels, by module.
KERNELS = {"kvcalc.attention.backends.split_kv": ("attend", "merge"), "kvcalc.attention.fused_step": ("step",)}


def interpret_triton() -> None:
    """Make kvcalc's Triton kernels kernels of the device. TRITON_INTERPRET must be set."""
    for path, names in KERNELS.items():
        module: Any = importlib.import_module(path)
        for name in names:
            setattr(module, name, Interpreted(f"triton {name}", getattr(module, name)))


if __name__ == "__main__":
    del sys.argv[0]
    quicken(pytest.MonkeyPatch())
    # For such small tensors, threads cost more than they save.
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_triton()
    with simulated_cuda():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
