"""kvcalc's own kernels for GPUs. They need Triton, which is imported only for a case that they can run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, dtype_name

# Of DeepSeek's latent: K, and V, which is its front.
LATENT_WIDTHS = 576, 512


class Triton(Backend):
    """For all kinds of attention and of caches: see `kvcalc.attention.backends.split_kv`."""

    name = "triton"
    module = "kvcalc.attention.backends.split_kv"
    reads_stored_rows = takes_lengths = True

    def why_not(self, case: Case) -> str | None:
        if case.device.type != "cuda":
            return "only runs on CUDA devices"
        if case.dtype not in (torch.float16, torch.bfloat16):
            return f"needs a 16-bit dtype, not {dtype_name(case.dtype)}"
        if case.stored_dtype not in (None, torch.int8, torch.float8_e4m3fn):
            return f"does not support {dtype_name(case.stored_dtype)} caches"
        return self.why_not_shape(case) or self._missing()

    def why_not_shape(self, case: Case) -> str | None:
        """The reason why the kernel does not support these head sizes here, or None if it does."""
        return None

    def load(self) -> Any:
        """The module with the kernel. It has no type, because Triton may not be installed."""
        return import_module(self.module)

    def _missing(self) -> str | None:
        """The reason why the module cannot be used (no Triton, or one that does not load), or None if it can."""
        try:
            self.load()
        except ImportError as error:
            return "triton is not installed" if error.name == "triton" else f"triton does not load: {error}"
        except (OSError, RuntimeError) as error:
            # Triton was built for another version of torch or CUDA.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"triton does not load: {reason}"
        return None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = self.load().decode(query, (key, value), (), None, key.shape[2], scale)
        return out

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        given = cache.tensors, cache.scales, cache.table, cache.held, scale, v_width
        out: Tensor = self.load().decode(query, *given, **self._options(cache))
        return out

    def _options(self, cache: Cache) -> dict[str, Any]:
        ragged = {"lengths": cache.lengths, "starts": cache.starts} if cache.is_ragged else {}
        return {**ragged, "is_fixed": cache.scaling != "row"}


class Gluon(Triton):
    """For MLA on Hopper: see `kvcalc.attention.backends.latent_hopper`."""

    name, module = "gluon", "kvcalc.attention.backends.latent_hopper"
    takes_lengths = False

    def _options(self, cache: Cache) -> dict[str, Any]:
        return {}  # a fixed scale is one of a row

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) if case.is_latent else "only runs MLA"

    def why_not_shape(self, case: Case) -> str | None:
        if (case.k_width, case.v_width) != LATENT_WIDTHS:
            return f"needs a latent of 512 + 64, not {case.v_width} + {case.k_width - case.v_width}"
        return why_not_hopper(case.device)


def why_not_hopper(device: torch.device) -> str | None:
    """The reason why `device` is not a Hopper GPU, or None if it is one."""
    if torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    return None
