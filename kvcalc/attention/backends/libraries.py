"""Kernels of optional libraries, used if they are installed: flash-attn, FlashMLA, and kvcalc's own in Triton.

Sources of the signatures and limits: https://github.com/Dao-AILab/flash-attention, flash_attn_interface.py, version 2,
and https://github.com/deepseek-ai/FlashMLA, flash_mla_interface.py and csrc/api/dense_decode.h. Its get_mla_metadata
uses the lengths in the first releases and ignores them in later ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, dtype_name, why_not_latent
from kvcalc.attention.ragged import on_device


class Library(Backend, ABC):
    """A library's kernel, for CUDA devices, 16-bit types, and preallocated caches of the same type.

    `module` is the module to import, which happens only when it is needed. `distribution` is the package to install.
    """

    module: str
    distribution: str

    def why_not(self, case: Case) -> str | None:
        if case.device.type != "cuda":
            return "only runs on CUDA devices"
        if case.dtype not in (torch.float16, torch.bfloat16):
            return f"needs a 16-bit dtype, not {dtype_name(case.dtype)}"
        return self.why_not_cache(case) or self.why_not_shape(case) or self._missing()

    def why_not_cache(self, case: Case) -> str | None:
        """The reason why the kernel does not read this kind of cache, or None if it does."""
        if case.stored_dtype is not None:
            return f"does not support {dtype_name(case.stored_dtype)} caches with a scale per {case.scaling}"
        return "needs a preallocated cache" if case.layout == "growing" else None

    @abstractmethod
    def why_not_shape(self, case: Case) -> str | None:
        """The reason why the kernel does not support these head or block sizes, or None if it does."""

    def load(self) -> Any:
        """The library's module. It has no type, because it may not be installed."""
        return import_module(self.module)

    def _missing(self) -> str | None:
        """The reason why the module cannot be used (not installed, or does not load), or None if it can."""
        try:
            self.load()
        except ImportError as error:
            if error.name in (self.module, self.distribution):
                return f"{self.distribution} is not installed"
            return f"{self.distribution} does not load: {error}"
        except (OSError, RuntimeError) as error:
            # The library was built for another version of torch or CUDA.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return f"{self.distribution} does not load: {reason}"
        return None


class Kept:
    """What a kernel needs for one shape and length, made once for all layers and steps of it. The last few are kept.

    It is made by the calls before a graph is captured, so a graph does not contain it.
    """

    most = 16

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            if len(self._made) == self.most:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        return self._made[key]


class FlashAttn(Library):
    """FlashAttention-2's kernel that splits the keys of one query over the device, for dense and paged caches."""

    name, module, distribution = "flash-attn", "flash_attn", "flash-attn"
    takes_lengths = True
    # The number of tokens per page must be a multiple of this.
    page_tokens = 256
    widest_head = 256

    def why_not_shape(self, case: Case) -> str | None:
        if case.is_latent or case.k_width != case.v_width:
            return "needs the same width for K and V"
        if case.k_width > self.widest_head:
            return f"supports heads of at most {self.widest_head}, not {case.k_width}"
        if case.k_width % 8:
            return f"would copy the cache, because {case.k_width} is not a multiple of 8"
        if case.block_size is not None and case.block_size % self.page_tokens:
            return f"needs blocks of a multiple of {self.page_tokens} tokens, not {case.block_size}"
        return None

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        (key, value), table = cache.tensors, cache.table
        if cache.is_ragged and table is None:
            return self._decode_packed(query, cache, scale)
        lengths: Tensor | None = on_device(cache.lengths, query.device)
        if table is None:
            # It expects (batch, tokens, heads, width): the same memory with different strides.
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        elif not cache.is_ragged and cache.held % key.shape[1] == 0:
            # Since July 2026 (#2711) it reads the lengths of paged sequences on the host, which no graph can capture.
            # Whole pages need no lengths.
            lengths, table = None, table[:, : cache.held // key.shape[1]]
        out: Tensor = self.load().flash_attn_with_kvcache(
            query.transpose(1, 2), key, value, cache_seqlens=lengths, block_table=table, softmax_scale=scale,
            causal=False,
        )  # fmt: skip
        return out.transpose(1, 2)

    def _decode_packed(self, query: Tensor, cache: Cache, scale: float | None) -> Tensor:
        """Sequences that follow each other in memory. They must be full, because one ends where the next one begins."""
        if cache.lengths != cache.capacities:
            return self.attend_one_by_one(query, cache, scale, None)
        queries = on_device(tuple(range(query.shape[0] + 1)), query.device)
        starts = on_device(cache.starts, query.device)
        out: Tensor = self.load().flash_attn_varlen_func(
            query[:, :, 0], *cache.tensors, queries, starts, 1, max(cache.lengths), softmax_scale=scale, causal=False
        )
        return out[:, :, None]


def why_not_hopper(device: torch.device) -> str | None:
    """The reason why `device` is not a Hopper GPU, or None if it is one."""
    if torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a Hopper GPU (compute capability 9.0)"
    return None


class FlashMla(Library):
    """DeepSeek's decode kernel for Hopper. It reads only the latent; V is its first 512 elements.

    A dense cache is viewed as pages of 64 tokens.
    """

    name, module, distribution = "flashmla", "flash_mla", "flash-mla"
    takes_lengths = True
    page_tokens = 64

    def __init__(self) -> None:
        self._kept = Kept()

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) if case.is_latent else "only runs MLA"

    def why_not_cache(self, case: Case) -> str | None:
        if case.stored_dtype == torch.float8_e4m3fn:
            return "reads fp8 in sparse attention only, in rows of 656 bytes with parts in 16 bits"
        return super().why_not_cache(case)

    def why_not_shape(self, case: Case) -> str | None:
        if reason := why_not_latent(case):
            return reason
        if case.block_size not in (None, self.page_tokens):
            return f"needs blocks of {self.page_tokens} tokens, not {case.block_size}"
        # On other devices it only has kernels for prompts and for sparse attention.
        return why_not_hopper(case.device)

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        (latent,), table = cache.tensors, cache.table
        heads = query.shape[1]
        if table is None:
            size = self.page_tokens
            table = self._kept(
                (query.device, "pages", cache.starts), lambda: page_numbers(cache.starts, size, query.device)
            )
            latent = latent.view(-1, size, 1, latent.shape[-1])
        lengths = on_device(cache.lengths, query.device)
        # Its documentation says to make the metadata once, for all layers of a step.
        plan, splits = self._kept(
            (query.device, cache.lengths, heads), lambda: self.load().get_mla_metadata(lengths, heads, 1)
        )
        out: Tensor = self.load().flash_mla_with_kvcache(
            query.transpose(1, 2), latent, table, lengths, v_width, plan, splits, softmax_scale=scale, causal=False
        )[0]  # fmt: skip
        return out.transpose(1, 2)


def page_numbers(starts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """The numbers of the pages of every sequence. A shorter one has those of the next ones behind its own.

    Sequence b has the rows from `starts[b]` on. Raises ValueError if these are not whole pages of `size`.
    """
    uneven = next((tokens for tokens in starts if tokens % size), None)
    if uneven is not None:
        raise ValueError(f"{uneven:,} tokens per sequence are not whole pages of {size}")
    first = torch.tensor(starts, dtype=torch.int32).to(device) // size
    pages = torch.arange(int(first.diff().max()), dtype=torch.int32, device=device)
    return (first[:-1, None] + pages).clamp(max=int(first[-1]) - 1)


class Triton(Library):
    """kvcalc's own kernel, for all kinds of attention and of caches: see `kvcalc.attention.backends.split_kv`."""

    name, module, distribution = "triton", "kvcalc.attention.backends.split_kv", "triton"
    reads_stored_rows = takes_lengths = True

    def why_not_cache(self, case: Case) -> str | None:
        if case.stored_dtype not in (None, torch.int8, torch.float8_e4m3fn):
            return f"does not support {dtype_name(case.stored_dtype)} caches"
        return None

    def why_not_shape(self, case: Case) -> str | None:
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
    """kvcalc's own kernel for MLA on Hopper: see `kvcalc.attention.backends.latent_hopper`."""

    name, module = "gluon", "kvcalc.attention.backends.latent_hopper"
    takes_lengths = False

    def _options(self, cache: Cache) -> dict[str, Any]:
        return {}  # a fixed scale is one of a row

    def why_not(self, case: Case) -> str | None:
        return super().why_not(case) if case.is_latent else "only runs MLA"

    def why_not_shape(self, case: Case) -> str | None:
        return why_not_latent(case) or why_not_hopper(case.device)
