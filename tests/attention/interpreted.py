"""Run kvcalc's Triton kernels in Triton's interpreter: a separate process, which answers until its stdin ends.

It reads a line with a JSON list of cases, and prints a line with the list of their results. The interpreter is chosen
by a variable when Triton is imported, so it cannot be in the process of the other tests.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvcalc.attention import fused_step, step
from kvcalc.attention.backends import split_kv
from kvcalc.attention.backends.triton import Triton
from kvcalc.attention.cache import GrowingCache, PagedCache, TokenCache
from kvcalc.attention.core import eager_attention
from kvcalc.attention.ragged import RaggedCache
from kvcalc.attention.rope import RotaryEmbedding

CPU = torch.device("cpu")
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "int8", "float8_e4m3fn")}
TORCH_DTYPES = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}  # fmt: skip


def mend_interpreter() -> None:
    """Triton 3.7's interpreter truncates when it converts to bf16 and fp8, and multiplies matrices of bf16 as the
    16-bit integers that it keeps them in. Here torch converts, and bf16 is multiplied as fp32.
    """
    create_dot = interpreter.InterpreterBuilder.create_dot

    def as_torch(bits: numpy.ndarray, dtype: tl.dtype) -> torch.Tensor:
        signed = bits.view(f"int{dtype.primitive_bitwidth}")
        return torch.from_numpy(numpy.ascontiguousarray(signed)).view(TORCH_DTYPES[dtype])

    def convert(bits: numpy.ndarray, before: tl.dtype, after: tl.dtype, rounding: object) -> numpy.ndarray:
        converted = as_torch(bits, before).to(TORCH_DTYPES[after])
        kept = getattr(torch, f"int{after.primitive_bitwidth}")
        return converted.view(kept).numpy().view(f"uint{after.primitive_bitwidth}")

    def widened(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(as_torch(handle.data, tl.bfloat16).float().numpy(), tl.float32)

    def dot(self, a, b, *rest):  # type: ignore[no-untyped-def]
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot


def hasten_interpreter() -> None:
    """Triton replaces the functions of its language at every call of a function, which takes a third of the time. Here
    they are replaced once for each module, and stay so.
    """
    replace, done = interpreter._patch_lang, set()

    def replace_once(function: Any) -> SimpleNamespace:
        if function.__module__ not in done:
            done.add(function.__module__)
            replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once


def make_cache(case: dict[str, Any], shapes: tuple[tuple[int, int], ...]) -> TokenCache:
    stored = DTYPES.get(case.get("stored", ""))
    scaling = case.get("scaling", "row")
    if "lengths" in case:
        kept = (*case["lengths"],), shapes, case.get("window"), DTYPES[case["dtype"]], CPU, stored, scaling
        return RaggedCache(*kept, block_size=case.get("block_size", 16) if case["layout"] == "paged" else None, seed=3)
    made = (2, shapes, case["tokens"], case.get("window"), DTYPES[case["dtype"]], CPU, stored, scaling)
    if case["layout"] == "paged":
        return PagedCache(*made, block_size=case.get("block_size", 16), seed=3)
    return (GrowingCache if case["layout"] == "growing" else TokenCache)(*made)


def error_of(case: dict[str, Any]) -> float:
    """The relative norm of the difference from attention in fp32 over the rows as they are stored."""
    heads, kv_heads, k_width, v_width = case["heads"]
    is_latent = bool(case.get("latent"))
    shapes = ((1, k_width),) if is_latent else ((kv_heads, k_width), (kv_heads, v_width))
    cache = make_cache(case, shapes)
    tokens, size, batch = cache.max_tokens, case.get("size", 1.0), cache.batch_size
    torch.manual_seed(0)
    cache.append(tuple((torch.randn(batch, h, tokens, w) * size).to(cache.dtype) for h, w in shapes))
    query = (torch.randn(batch, heads, 1, k_width) / size).to(cache.dtype)
    out = Triton().attend(query, cache, 0.1, v_width if is_latent else None)
    assert out.dtype == cache.dtype
    return max(
        error_of_one(query[first : first + one.batch_size], one, out[first : first + one.batch_size], v_width)
        for first, one in enumerate(cache.each())
    )


def error_of_one(query: torch.Tensor, cache: TokenCache, out: torch.Tensor, v_width: int) -> float:
    cache.dtype = torch.float32
    rows = tuple(view.float() for view in cache.views())
    key, value = rows if len(rows) == 2 else (rows[0], rows[0][..., :v_width])
    expected = eager_attention(query.float(), key, value, scale=0.1)
    return float((out.float() - expected).norm() / expected.norm())


def is_same_step(case: dict[str, Any]) -> bool:
    """Whether several steps give the same bits as the operations they replace: rotated queries, rows and scales."""
    rope_dim, is_latent = case["rope_dim"], bool(case.get("latent"))
    dtype = DTYPES[case["dtype"]]
    shapes = ((1, 40 + rope_dim),) if is_latent else ((2, 24), (2, 18))
    fused, plain = make_cache(case, shapes), make_cache(case, shapes)
    rope = RotaryEmbedding(rope_dim) if rope_dim else None
    same = True
    batch = fused.batch_size
    begin = fused.length = plain.length = max(plain.behind, default=0)
    for number in range(7):
        torch.manual_seed(number)
        front = value = None
        if is_latent:
            query = torch.randn(batch, 1, 4 * (30 + rope_dim)).to(dtype).view(batch, 1, 4, -1).transpose(1, 2)[..., 30:]
            down = torch.randn(batch, 1, 1, 40 + rope_dim).to(dtype)
            front, key = down[..., :40].clone(), down[..., 40:]
        else:
            widths = ((4, 24), (2, 24), (2, 18))
            made = (torch.randn(batch, 1, h * w).to(dtype).view(batch, 1, h, w).transpose(1, 2) for h, w in widths)
            query, key, value = made
        rotated = fused_step.rotate_and_append(rope, query, key, fused, value, front)
        expected = step.rotate_and_append(rope, query, key, plain, value=value, front=front)
        pairs = zip((rotated, *fused.tensors, *fused.scales), (expected, *plain.tensors, *plain.scales))
        same &= fused.length == plain.length == begin + number + 1
        same &= all(torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in pairs)
    return same


if __name__ == "__main__":
    mend_interpreter()
    hasten_interpreter()
    assert fused_step.is_right(CPU)
    own: Any = split_kv.device_of
    for line in sys.stdin:
        results: list[float] = []
        for case in json.loads(line):
            device = case.get("device")
            vars(split_kv)["device_of"] = (lambda _, found=device: tuple(found)) if device else own
            results.append(float(is_same_step(case)) if "rope_dim" in case else error_of(case))
        print(json.dumps(results), flush=True)
