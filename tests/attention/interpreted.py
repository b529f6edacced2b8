"""Run kvcalc's Triton kernel in Triton's interpreter, and print the error of each case as JSON: a separate process.

The interpreter is chosen by a variable when Triton is imported, so it cannot be in the process of the other tests.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvcalc.attention.backends import split_kv
from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.core import eager_attention

CPU = torch.device("cpu")
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "int8", "float8_e4m3fn")}


def multiply_bf16_as_fp32() -> None:
    """The interpreter keeps bf16 in 16-bit integers, and `tl.dot` multiplies these integers (Triton 3.7)."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(numpy.uint16).astype(numpy.uint32) << 16
        return interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)

    def dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot


def make_cache(case: dict[str, object], shapes: tuple[tuple[int, int], ...]) -> TokenCache:
    stored = DTYPES.get(str(case.get("stored")))
    made = (2, shapes, case["tokens"], case.get("window"), DTYPES[str(case["dtype"])], CPU, stored)
    if case["layout"] == "paged":
        return PagedCache(*made, block_size=case.get("block_size", 16), seed=3)  # type: ignore[arg-type]
    return (GrowingCache if case["layout"] == "growing" else TokenCache)(*made)  # type: ignore[arg-type]


def error_of(case: dict[str, object]) -> float:
    """The relative norm of the difference from attention in fp32 over the rows as they are stored."""
    heads, kv_heads, k_width, v_width = case["heads"]  # type: ignore[misc]
    is_latent = bool(case.get("latent"))
    shapes = ((1, k_width),) if is_latent else ((kv_heads, k_width), (kv_heads, v_width))
    cache = make_cache(case, shapes)
    tokens = case["tokens"]
    assert isinstance(tokens, int)
    torch.manual_seed(0)
    size = float(case.get("size", 1.0))  # type: ignore[arg-type]
    cache.append(tuple((torch.randn(2, h, tokens, w) * size).to(cache.dtype) for h, w in shapes))
    query = (torch.randn(2, heads, 1, k_width) / size).to(cache.dtype)
    out = split_kv.decode(
        query, cache.tensors, cache.scales, cache.table, cache.held, 0.1, v_width if is_latent else None
    )
    assert out.dtype == cache.dtype
    cache.dtype = torch.float32
    rows = tuple(view.float() for view in cache.views())
    key, value = (rows[0], rows[0][..., :v_width]) if is_latent else rows
    expected = eager_attention(query.float(), key, value, scale=0.1)
    return float((out.float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    multiply_bf16_as_fp32()
    errors = []
    for case in json.load(sys.stdin):
        device = case.get("device")
        split_kv.device_of = (lambda _, found=device: tuple(found)) if device else split_kv.device_of
        errors.append(error_of(case))
    json.dump(errors, sys.stdout)
