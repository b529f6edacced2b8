"""torch's scaled_dot_product_attention over one copy of K and V, without a causal flag.

On a CPU it is one backend. On CUDA, torch chooses one of several kernels, by its release, the device and the shape, so
each kernel is a backend with its own name.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from kvcalc.attention.backends.base import Backend, Case, dtype_name
from kvcalc.attention.core import grouped_attention

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_WIDEST_FLASH_HEAD = 256
# cuDNN 9.19 on Hopper has no kernel for MLA's 576 elements ("No available kernel", measured on an H200). Its forward
# pass takes up to 256 (https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html).
_WIDEST_CUDNN_HEAD = 256


class GroupedSdpa(Backend):
    """The kernel that torch chooses. On CUDA this is never cuDNN's: see `kvcalc.attention.core.ANY_LENGTH`."""

    name = "grouped-sdpa"

    def why_not(self, case: Case) -> str | None:
        return "on CUDA, use sdpa-flash, sdpa-efficient or sdpa-cudnn" if case.device.type == "cuda" else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return grouped_attention(query, key, value, scale=scale)


class SdpaKernel(Backend):
    """One of the kernels that torch has for CUDA, and no other: `flash`, `efficient` or `cudnn`."""

    def __init__(self, kernel: str) -> None:
        self.name, self._kernel = f"sdpa-{kernel}", kernel

    def why_not(self, case: Case) -> str | None:
        if case.device.type != "cuda":
            return "only runs on CUDA devices"
        is_half = case.dtype in (torch.float16, torch.bfloat16)
        if not is_half and self._kernel != "efficient":
            return f"needs a 16-bit dtype, not {dtype_name(case.dtype)}"
        aligned = 8 if is_half else 4
        if case.k_width % aligned or case.v_width % aligned:
            return f"needs head widths that are multiples of {aligned}, not {case.k_width} and {case.v_width}"
        if self._kernel == "flash" and not case.k_width == case.v_width <= _WIDEST_FLASH_HEAD:
            return f"needs the same width for K and V, at most {_WIDEST_FLASH_HEAD}"
        if self._kernel == "cudnn" and max(case.k_width, case.v_width) > _WIDEST_CUDNN_HEAD:
            return f"needs heads of at most {_WIDEST_CUDNN_HEAD}, not {max(case.k_width, case.v_width)}"
        return None

    def why_not_unasked(self, case: Case) -> str | None:
        return "makes a new plan for every length, run only by name" if self._kernel == "cudnn" else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        return grouped_attention(query, key, value, scale=scale, kernels=[_KERNELS[self._kernel]])
