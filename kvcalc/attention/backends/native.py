"""The decode step in C for CPUs. K and V are read once in any type, and everything is computed in fp32.

torch's CPU kernels are designed for many queries. With one query they reach at most half of the memory bandwidth, and
far less with 16-bit types. `decode.c` is compiled once on this machine (`compiled`).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvcalc.attention.backends.base import Backend, Cache, Case, dtype_name
from kvcalc.attention.backends.compiled import built

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
# The number of parts per thread, the minimum number of tokens in a part, and WIDE_TILE of the source, the largest tile.
_PARTS_PER_THREAD = 4
_TOKENS_PER_PART = 256
_TILE = 64


class _Rows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride_b", "stride_g", "stride_s", "scale_b", "scale_g", "scale_s")),
        ("width", ctypes.c_int64),
    ]


class _Pages(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p), ("stride", ctypes.c_int64), ("block", ctypes.c_int64), ("starts", ctypes.c_void_p),
    ]  # fmt: skip


class Native(Backend):
    """`decode.c` through ctypes."""

    name = "native"
    takes_lengths = True

    def __init__(self) -> None:
        self._library: Any = None
        self._work = torch.empty(0)

    def why_not(self, case: Case) -> str | None:
        if case.device.type != "cpu":
            return "only runs on CPUs"
        kept = case.stored_dtype or case.dtype
        if kept not in _TYPES:
            return f"does not support {dtype_name(kept)} caches"
        if self._library is None and self.failure is None:
            try:
                self._library = load()
            except OSError as error:
                self.failure = str(error)
        return self.failure

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (key, value))
        rows = [_rows(tensor, None, (0, 1, 2)) for tensor in (key, value)]
        lengths = (key.shape[2],) * key.shape[0]
        return self._run(query, rows, _Pages(None, 0, 1, None), key.dtype, key.shape[1], lengths, scale)

    def decode(self, query: Tensor, cache: Cache, scale: float | None = None, v_width: int | None = None) -> Tensor:
        if cache.layout == "growing" and not cache.scales:
            return super().decode(query, cache, scale, v_width)
        tensors, scales, table = cache.tensors, cache.scales or (None, None), cache.table
        # The dimensions of sequences, blocks or rows, of heads, and of tokens.
        axes = (0, 2, 1) if table is not None else (0, 1, 0) if cache.is_ragged else (0, 1, 2)
        rows = [_rows(tensor, s, axes) for tensor, s in zip(tensors, scales)]
        if v_width is not None:
            rows.append(_rows(tensors[0], scales[0], axes))
            rows[1].width = v_width
        starts = _integers(cache.starts) if cache.is_ragged and table is None else None
        pages = _Pages(None, 0, 1, None if starts is None else ctypes.addressof(starts))
        if table is not None:
            pages = _Pages(table.data_ptr(), table.stride(0), tensors[0].shape[1], None)
        return self._run(query, rows, pages, tensors[0].dtype, tensors[0].shape[axes[1]], cache.lengths, scale)

    def _run(
        self, query: Tensor, rows: list[_Rows], pages: _Pages, dtype: torch.dtype, groups: int,
        lengths: tuple[int, ...], scale: float | None,
    ) -> Tensor:  # fmt: skip
        if self._library is None:
            self._library = load()
        batch, heads, _, width = query.shape
        each, threads = heads // groups, torch.get_num_threads()
        length = max(_TOKENS_PER_PART, -(-groups * sum(lengths) // (_PARTS_PER_THREAD * threads)))
        # No part is much shorter than another one of the longest sequence, and all but the last are whole tiles.
        longest = max(lengths)
        length = -(-longest // -(-longest // length))
        length = -(-length // _TILE) * _TILE
        dense, tokens = query.float().contiguous(), _integers(lengths)
        v_width = rows[1].width
        need = self._library.kvcalc_decode_work(batch, groups, each, tokens, length, width, v_width)
        if self._work.numel() < need:
            self._work = torch.empty(need)
        out = torch.empty(batch, heads, 1, v_width)
        self._library.kvcalc_decode(
            dense.data_ptr(), rows[0], rows[1], pages, out.data_ptr(), self._work.data_ptr(), batch, groups, each,
            tokens, length, width**-0.5 if scale is None else scale, _TYPES[dtype], threads,
        )  # fmt: skip
        return out.to(query.dtype)


@lru_cache(maxsize=64)
def _integers(numbers: tuple[int, ...]) -> Any:
    """An array of C. The last few are kept."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _rows(tensor: Tensor, scales: Tensor | None, axes: tuple[int, int, int]) -> _Rows:
    """The location of the rows of `tensor`, whose dimensions of sequences (or blocks), heads and tokens are `axes`."""
    of_scales = [0 if scales is None else scales.stride(axis) for axis in axes]
    return _Rows(
        tensor.data_ptr(), None if scales is None else scales.data_ptr(), *(tensor.stride(axis) for axis in axes),
        *of_scales, tensor.shape[-1],
    )  # fmt: skip


def load() -> Any:
    """Load the compiled library, and compile it first if necessary.

    Raises OSError with a one-line reason if there is no C compiler, or if compiling fails.
    """
    library = ctypes.CDLL(str(built()))
    library.kvcalc_decode_work.restype = ctypes.c_int64
    number, numbers = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    library.kvcalc_decode_work.argtypes = [number, number, number, numbers, number, number, number]
    library.kvcalc_decode.restype = None
    library.kvcalc_decode.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(_Rows), ctypes.POINTER(_Rows), ctypes.POINTER(_Pages), ctypes.c_void_p,
        ctypes.c_void_p, number, number, number, numbers, number, ctypes.c_float, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library
