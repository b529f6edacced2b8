"""MLA's decode attention for Hopper, in Gluon, the part of Triton with which a kernel places its own memory and waits.

It does what `split_kv.attend` does. Triton's compiler makes each half of a thread block compute all scores, and loads a
tile of latents just before it needs it. Here each half computes its own tokens' scores, and the next tile is loaded
while this one is multiplied. 8-bit latents are loaded as they are, and widened once in shared memory.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvcalc.attention.backends import split_kv
from kvcalc.attention.backends.triton import LATENT_WIDTHS

HEADS = TOKENS = 64
"""The rows of Hopper's matrix instructions, and the tokens of a tile. Two tiles and the query fill shared memory."""
_WARPS = 8
# Its name in Triton 3.6 and later, and before.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _copy_part(
    to, key, table, tile, sequence, tokens, k_b, k_s, table_b,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start to copy `WIDTH` elements of a tile's rows, from `FIRST` on. The last row stands for those behind it."""
    token = gl.minimum(tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), tokens - 1)
    unit, place = sequence, token
    if PAGE:
        unit, place = gl.load(table + sequence * table_b + token // PAGE).to(gl.int64), token % PAGE
    at = unit * k_b + place.to(gl.int64) * k_s
    element = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    async_copy.async_copy_global_to_shared(to, key + at[:, None] + element[None, :])


@gluon.jit
def _copy(
    front, rest, key, table, tile, sequence, tokens, k_b, k_s, table_b,
    V: gl.constexpr, REST: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile. Each thread copies 16 bytes at a time."""
    EACH: gl.constexpr = 128 // key.dtype.element_ty.primitive_bitwidth
    FRONT_ROWS: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [gl.num_warps(), 1], [1, 0])
    SHAPE: gl.constexpr = [32 * EACH // REST, REST // EACH]
    REST_ROWS: gl.constexpr = gl.BlockedLayout([1, EACH], SHAPE, [gl.num_warps(), 1], [1, 0])
    _copy_part(front, key, table, tile, sequence, tokens, k_b, k_s, table_b, 0, V, PAGE, TOKENS, FRONT_ROWS)
    _copy_part(rest, key, table, tile, sequence, tokens, k_b, k_s, table_b, V, REST, PAGE, TOKENS, REST_ROWS)
    async_copy.commit_group()


@gluon.jit
def _widened(rows):
    """8-bit rows in fp16, which holds every int8 and e4m3 number exactly."""
    if rows.dtype == gl.int8:
        # The bits of 1024 + n in fp16 end with those of n.
        bits = (rows.to(gl.uint8, bitcast=True) ^ 0x80).to(gl.uint16) | 0x6400
        wide = (bits.to(gl.uint16).to(gl.float16, bitcast=True) - 1152.0).to(gl.float16)
    else:
        wide = rows.to(gl.float16)
    return wide


@gluon.jit(do_not_specialize=["tokens", "tiles"])
def attend(
    query, key, key_scale, table, part, log_sum, scale, tokens, tiles, q_b, q_h, k_b, k_s, ks_b, ks_s, table_b,
    EACH: gl.constexpr, V: gl.constexpr, REST: gl.constexpr, PAGE: gl.constexpr, IS_SCALED: gl.constexpr,
    HEADS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """One part: the query heads of a block, over its share of the `tiles`. See `split_kv.attend`."""
    warps: gl.constexpr = gl.num_warps()
    front_rows: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    rest_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, TOKENS * 4 // warps, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 256, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    dtype: gl.constexpr = gl.float16 if IS_SCALED else query.dtype.element_ty
    stages: gl.constexpr = 1 if IS_SCALED else 2

    split, sequence = gl.program_id(1), gl.program_id(2).to(gl.int64)
    first_head = gl.program_id(0) * HEADS
    splits = gl.num_programs(1)
    first, last = split * tiles // splits, (split + 1) * tiles // splits
    # Without it, ptxas takes the result to be written while it is multiplied, and lets each multiplication wait.
    gl.assume(last > first)

    front = gl.allocate_shared_memory(dtype, [stages, TOKENS, V], shared)
    rest = gl.allocate_shared_memory(dtype, [stages, TOKENS, REST], shared)
    if IS_SCALED:
        raw_front = gl.allocate_shared_memory(key.dtype.element_ty, [TOKENS, V], plain)
        raw_rest = gl.allocate_shared_memory(key.dtype.element_ty, [TOKENS, REST], plain)
    _copy(
        raw_front if IS_SCALED else front.index(0), raw_rest if IS_SCALED else rest.index(0), key, table, first,
        sequence, tokens, k_b, k_s, table_b, V, REST, PAGE, TOKENS,
    )  # fmt: skip

    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, front_rows))
    at = query + sequence * q_b + head[:, None] * q_h + gl.arange(0, V, gl.SliceLayout(0, front_rows))[None, :]
    q = gl.load(at, mask=head[:, None] < EACH, other=0.0)
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, rest_rows))
    at = query + sequence * q_b + head[:, None] * q_h + V + gl.arange(0, REST, gl.SliceLayout(0, rest_rows))[None, :]
    q_rest = gl.load(at, mask=head[:, None] < EACH, other=0.0)
    factor = gl.full([HEADS], scale, gl.float32, gl.SliceLayout(1, of_scores))
    if IS_SCALED:
        # Dividing by the largest element keeps the query in the range of fp16.
        most_rest = gl.max(gl.abs(q_rest.to(gl.float32)), 1)
        most = gl.max(gl.abs(q.to(gl.float32)), 1)
        most = gl.maximum(gl.maximum(most, gl.convert_layout(most_rest, most.type.layout)), 1e-30)
        q = (q / most[:, None]).to(gl.float16)
        q_rest = (q_rest / gl.convert_layout(most, most_rest.type.layout)[:, None]).to(gl.float16)
        factor *= gl.convert_layout(most, factor.type.layout)
    q_front = gl.allocate_shared_memory(dtype, [HEADS, V], shared, q)
    q_rest = gl.allocate_shared_memory(dtype, [HEADS, REST], shared, q_rest)
    p = gl.allocate_shared_memory(dtype, [HEADS, TOKENS], shared)

    largest = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
    # Sums per place in a tile. The halves of the block add theirs only once, in the end.
    total = gl.zeros([HEADS, TOKENS], gl.float32, of_scores)
    result = gl.zeros([HEADS, V], gl.float32, of_result)
    nothing = gl.zeros([HEADS, TOKENS], gl.float32, of_scores)
    for tile in range(first, last):
        now = 0 if IS_SCALED else (tile - first) % 2
        k_front, k_rest = front.index(now), rest.index(now)
        async_copy.wait_group(0)
        if IS_SCALED:
            _barrier()
            k_front.store(_widened(raw_front.load(front_rows)))
            k_rest.store(_widened(raw_rest.load(rest_rows)))
        fence_async_shared()
        _barrier()
        scores = warpgroup_mma(q_front, k_front.permute((1, 0)), nothing, is_async=True)
        scores = warpgroup_mma(q_rest, k_rest.permute((1, 0)), scores, is_async=True)
        if tile + 1 < last:
            _copy(
                raw_front if IS_SCALED else front.index(1 - now), raw_rest if IS_SCALED else rest.index(1 - now), key,
                table, tile + 1, sequence, tokens, k_b, k_s, table_b, V, REST, PAGE, TOKENS,
            )  # fmt: skip
        token = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, of_scores))
        is_token = token < tokens
        if IS_SCALED:
            token = gl.minimum(token, tokens - 1)
            if PAGE:
                page = gl.load(table + sequence * table_b + token // PAGE).to(gl.int64)
                row_scale = gl.load(key_scale + page * ks_b + (token % PAGE).to(gl.int64) * ks_s)
            else:
                row_scale = gl.load(key_scale + sequence * ks_b + token.to(gl.int64) * ks_s)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if IS_SCALED:
            scores *= row_scale[None, :]
        scores = gl.where(is_token[None, :], scores * factor[:, None], float("-inf"))
        weighted = scores
        if IS_SCALED:
            # The scale of a row of V is part of its weight: 2 ** (score + log2(scale)). It is not in `total`.
            weighted += gl.log2(gl.maximum(row_scale, 1e-30))[None, :]
        larger = gl.maximum(largest, gl.max(weighted, 1))
        weights, shrink = gl.exp2(weighted - larger[:, None]), gl.exp2(largest - larger)
        shares = gl.exp2(scores - larger[:, None]) if IS_SCALED else weights
        total, largest = total * shrink[:, None] + shares, larger
        p.store(weights.to(dtype))
        fence_async_shared()
        result = result * gl.convert_layout(shrink, gl.SliceLayout(1, of_result))[:, None]
        _barrier()
        result = warpgroup_mma(p, k_front, result)
    whole = gl.sum(total, 1)
    result = (result / gl.convert_layout(whole, gl.SliceLayout(1, of_result))[:, None]).to(part.dtype.element_ty)
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, front_rows))
    at = part + ((sequence * EACH + head) * splits + split)[:, None] * V
    at += gl.arange(0, V, gl.SliceLayout(0, front_rows))[None, :]
    gl.store(at, gl.convert_layout(result, front_rows), mask=head[:, None] < EACH)
    head = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, of_scores))
    gl.store(log_sum + (sequence * EACH + head) * splits + split, largest + gl.log2(whole), mask=head < EACH)


def decode(
    query: Tensor, rows: tuple[Tensor, ...], scales: tuple[Tensor, ...], table: Tensor | None, tokens: int,
    scale: float, v_width: int | None = None,
) -> Tensor:  # fmt: skip
    """As `split_kv.decode`, for a latent of `LATENT_WIDTHS`."""
    ((latent,), batch, heads, axis) = rows, *query.shape[:2], 2 if table is None else 1
    width, v_width = LATENT_WIDTHS
    (row_scale,) = scales or (query,)
    blocks, tiles = triton.cdiv(heads, HEADS), triton.cdiv(tokens, TOKENS)
    splits = split_kv.parts(batch * blocks, tiles, split_kv.device_of(query.device)[1])
    part, log_sum = split_kv.parts_of(batch * heads * splits, query, v_width)
    attend[blocks, splits, batch](
        query, latent, row_scale, query if table is None else table, part, log_sum, scale * split_kv.LOG2_E, tokens,
        tiles, query.stride(0), query.stride(1), latent.stride(0), latent.stride(axis), row_scale.stride(0),
        row_scale.stride(axis), 0 if table is None else table.stride(0),
        EACH=heads, V=v_width, REST=width - v_width, PAGE=0 if table is None else latent.shape[1],
        IS_SCALED=bool(scales), HEADS=HEADS, TOKENS=TOKENS, num_warps=_WARPS,
    )  # fmt: skip
    return split_kv.merged(query, part, log_sum, splits)
