"""`kvcalc.attention.step` as one Triton kernel: rotate the query, rotate the key, and write the row into the cache.

Every product is rounded to the element type, as in the operations of `RotaryEmbedding` and `quantize`, so the results
are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from kvcalc.attention.cache import PagedCache, TokenCache
from kvcalc.attention.ragged import RaggedCache
from kvcalc.attention.rope import RotaryEmbedding

__all__ = ["TritonError", "can_store", "is_right", "rotate_and_append"]

# Adding and subtracting 1.5 * 2**23 rounds an fp32 number to an integer, halves to the even one.
_ROUNDS = tl.constexpr(12582912.0)


@triton.jit
def _rotated(at, cos, sin, element, WIDTH, HALF: tl.constexpr):
    """Elements of a row of `WIDTH`, whose first 2 * HALF are rotated."""
    x = tl.load(at + element, mask=(element >= 0) & (element < WIDTH), other=0.0)
    if HALF:
        is_first, is_turned = element < HALF, (element >= 0) & (element < 2 * HALF)
        y = tl.load(at + tl.where(is_first, element + HALF, element - HALF), mask=is_turned, other=0.0)
        angle = tl.where(is_first, element, element - HALF)
        c, s = tl.load(cos + angle, mask=is_turned, other=0.0), tl.load(sin + angle, mask=is_turned, other=0.0)
        first = (x.to(tl.float32) * c.to(tl.float32)).to(x.dtype)
        second = (y.to(tl.float32) * s.to(tl.float32)).to(x.dtype)
        turned = first.to(tl.float32) + tl.where(is_first, -second.to(tl.float32), second.to(tl.float32))
        x = tl.where(is_turned, turned.to(x.dtype), x)
    return x


@triton.jit
def _store(row, tensor, scale, element, WIDTH, MOST: tl.constexpr, IS_FIXED: tl.constexpr):
    """Store a row, in 8 bits if `MOST` is the largest number of the type: with its scale, or by one that is fixed."""
    if MOST:
        row = row.to(tl.float32)
        most = tl.full([], MOST, tl.float32)
        factor = tl.load(scale) if IS_FIXED else tl.maximum(tl.max(tl.abs(row)), 1e-30) * (1.0 / MOST)
        row = tl.minimum(tl.maximum(tl.div_rn(row, factor), -most), most)
        if MOST == 127:
            row = (row + _ROUNDS) - _ROUNDS
        if not IS_FIXED:
            tl.store(scale, factor)
    tl.store(tensor + element, row.to(tensor.dtype.element_ty), mask=element < WIDTH)


@triton.jit(do_not_specialize=["slot"])
def step(
    query, out, key, front, value, cos, sin, keys, values, key_scales, value_scales, table, starts, behind, capacities,
    slot, q_b, q_h, k_b, k_g, f_b, v_b, v_g,
    ks_u, ks_g, ks_s, vs_u, vs_g, vs_s, kf_u, kf_g, kf_s, vf_u, vf_g, vf_s, table_b,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    FRONT: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, MOST: tl.constexpr, IS_FIXED: tl.constexpr,
    RAGGED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row of one sequence: a head of the query, or of K, or of V.

    If the sequences have different lengths, `slot` is the length of the longest one.
    """
    row, sequence = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    element = tl.arange(0, WIDTH)
    unit, place = sequence, slot
    if RAGGED:
        slot = (slot - tl.load(behind + sequence)) % tl.load(capacities + sequence)
        unit, place = tl.load(starts + sequence).to(tl.int64), slot
        cos, sin = cos + sequence * HALF, sin + sequence * HALF
    if PAGE:
        unit, place = tl.load(table + sequence * table_b + slot // PAGE).to(tl.int64), slot % PAGE
    if row < HEADS:
        x = _rotated(query + sequence * q_b + row * q_h, cos, sin, element, Q, HALF)
        tl.store(out + (sequence * HEADS + row) * Q + element, x, mask=element < Q)
    elif row < HEADS + GROUPS:
        group = row - HEADS
        x = _rotated(key + sequence * k_b + group * k_g, cos, sin, element - FRONT, K, HALF)
        if FRONT:
            before = tl.load(front + sequence * f_b + element, mask=element < FRONT, other=0.0)
            x = tl.where(element < FRONT, before, x)
        at, scale = keys + unit * ks_u + group * ks_g + place * ks_s, key_scales + unit * kf_u + group * kf_g
        _store(x, at, scale + place * kf_s, element, FRONT + K, MOST, IS_FIXED)
    else:
        group = row - HEADS - GROUPS
        x = tl.load(value + sequence * v_b + group * v_g + element, mask=element < V, other=0.0)
        at, scale = values + unit * vs_u + group * vs_g + place * vs_s, value_scales + unit * vf_u + group * vf_g
        _store(x, at, scale + place * vf_s, element, V, MOST, IS_FIXED)


def can_store(cache: TokenCache) -> bool:
    """Whether this device converts numbers to the cache's type. GPUs before Ada do not know e4m3."""
    if cache.stored_dtype != torch.float8_e4m3fn:
        return True
    device = cache.tensors[0].device
    return device.type == "cpu" or (not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9))


def rotate_and_append(
    rope: RotaryEmbedding | None, query: Tensor, key: Tensor, cache: TokenCache, value: Tensor | None,
    front: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvcalc.attention.step.rotate_and_append`.

    Raises ValueError beyond the cache's max_tokens, and TritonError, with nothing appended, if it does not compile.
    """
    if cache.length >= cache.max_tokens:
        raise ValueError(f"{cache.length} + 1 tokens do not fit a cache of {cache.max_tokens}")
    batch, heads, _, width = query.shape
    axes = (0, 2, 1) if cache.table is not None else (0, 1, 0) if cache.is_ragged else (0, 1, 2)
    tensors, scales = (cache.tensors[0], cache.tensors[-1]), cache.scales or cache.tensors
    strides = [each.stride(axis) for each in (*tensors, scales[0], scales[-1]) for axis in axes]
    cos, sin = (query, query) if rope is None else rope.rotation(cache.length, 1, query.dtype, cache.behind)
    places, slot = [query, query, query], cache.length % cache.capacity
    if isinstance(cache, RaggedCache):
        places, slot = [cache.numbers(name) for name in ("starts", "behind", "capacities")], cache.length
    most = {None: 0, torch.int8: 127}.get(cache.stored_dtype, 448)
    k_width, v_width = key.shape[-1], 0 if value is None else value.shape[-1]
    before = 0 if front is None else front.shape[-1]
    kept, first = key if value is None else value, key if front is None else front
    out = torch.empty(batch, heads, 1, width, dtype=query.dtype, device=query.device)
    groups = key.shape[1]
    step[heads + groups * (1 if value is None else 2), batch](
        query, out, key, first, kept, cos, sin, *tensors, scales[0], scales[-1],
        query if cache.table is None else cache.table, *places, slot, query.stride(0), query.stride(1),
        key.stride(0), key.stride(1), first.stride(0), kept.stride(0), kept.stride(1), *strides,
        0 if cache.table is None else cache.table.stride(0),
        HEADS=heads, GROUPS=groups, HALF=0 if rope is None else rope.rope_dim // 2, Q=width, K=k_width, FRONT=before,
        V=v_width, PAGE=cache.block_size or 0, MOST=most, IS_FIXED=cache.scaling != "row",
        RAGGED=cache.is_ragged,
        WIDTH=max(16, triton.next_power_of_2(max(width, before + k_width, v_width))),
    )  # fmt: skip
    cache.length += 1
    return out


def is_right(device: torch.device) -> bool:
    """Whether the kernel does the same as the operations, for one small step on `device`."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(2, heads, 1, 24, generator=generator).to(device, torch.bfloat16)

    rope, query, key, value = RotaryEmbedding(16, device=device), random(4), random(2), random(2)
    shapes = ((2, 24), (2, 24))
    fused, plain = (PagedCache(2, shapes, 8, None, torch.bfloat16, device, torch.int8, block_size=4) for _ in range(2))
    start = fused.length = plain.length = 5
    rotated = rotate_and_append(rope, query, key, fused, value, None)
    plain.append((rope(key, start), value))
    pairs = zip((rotated, *fused.tensors, *fused.scales), (rope(query, start), *plain.tensors, *plain.scales))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
