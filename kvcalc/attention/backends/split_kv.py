"""Decode attention in Triton: one query per head over a cache, which is read once, in the type it is stored in.

The tokens of a sequence are split over thread blocks, so that one sequence occupies the whole GPU. Every thread block
reads its tokens for all query heads of a group, and writes its part of the output and the logarithm of its sum of
weights. A second kernel merges the parts (Dao et al. 2023, "Flash-Decoding for long-context inference").

This module needs Triton, which torch's CUDA and ROCm builds install.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcalc.attention.ragged import on_device
from kvcalc.records import NamedTuple

# Merging reads this many elements of the output at a time.
_ELEMENTS = 128
LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """The work of a thread block: query heads and tokens at a time, warps, stages of loads, blocks per processor."""

    heads: int
    tokens: int
    warps: int
    stages: int
    per_processor: int


@triton.jit
def _widened(rows, dtype: tl.constexpr):
    """Rows in `dtype`. uint8 holds e4m3 numbers, for devices that cannot convert them."""
    if rows.dtype == tl.uint8:
        # Exponent and mantissa, moved into those of fp16, whose exponent of 0 is greater by 8.
        bits = rows.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    if rows.dtype == tl.int8:
        # The bits of 1024 + n in fp16 end with those of n.
        bits = (rows.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    return rows.to(dtype)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def attend(
    query, key, value, key_scale, value_scale, table, batch, part, log_sum, scale, tokens, tiles,
    q_b, q_h, k_b, k_g, k_s, v_b, v_g, v_s, ks_b, ks_g, ks_s, vs_b, vs_g, vs_s, table_b,
    EACH: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr, K_WIDTH: tl.constexpr, FRONT_WIDTH: tl.constexpr,
    V: tl.constexpr, V_WIDTH: tl.constexpr, PAGE: tl.constexpr, IS_LATENT: tl.constexpr, IS_SCALED: tl.constexpr,
    IS_FIXED: tl.constexpr, RAGGED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One part: the query heads of a block, over its share of the `tiles`. K is [front | rest], in powers of 2.

    Rows of K are at `k_b` (times the sequence, or the page), `k_g` (KV head) and `k_s` (token); V and scales likewise.
    With `IS_FIXED`, all rows of a KV head have one scale, which is a factor of the scores, or of the result. If the
    sequences have different lengths, `batch` is what `ragged` says, for `RAGGED` sequences.
    """
    blocks: tl.constexpr = (EACH + HEADS - 1) // HEADS
    group, split, sequence = tl.program_id(0).to(tl.int64) // blocks, tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits, start = tl.num_programs(1), sequence
    first_part = sequence * splits
    if RAGGED:
        # Here `split` counts the parts of all sequences.
        sequence = tl.load(batch + 3 * RAGGED + 1 + split).to(tl.int64)
        first_part = tl.load(batch + sequence).to(tl.int64)
        splits = tl.load(batch + sequence + 1) - first_part.to(tl.int32)
        split -= first_part.to(tl.int32)
        tokens = tl.load(batch + RAGGED + 1 + sequence)
        tiles = (tokens + TOKENS - 1) // TOKENS
        start = tl.load(batch + 2 * RAGGED + 1 + sequence).to(tl.int64)
    row = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    head, is_row = group * EACH + row, (row < EACH)[:, None]
    front, out = tl.arange(0, FRONT), tl.arange(0, V)
    q_at = query + sequence * q_b + head[:, None] * q_h
    q = tl.load(q_at + front, mask=is_row & (front < FRONT_WIDTH), other=0.0)
    if REST:
        rest = FRONT_WIDTH + tl.arange(0, REST)
        q_rest = tl.load(q_at + rest, mask=is_row & (rest < K_WIDTH), other=0.0)
    factor = tl.full([HEADS], scale, tl.float32)
    if IS_SCALED:
        # fp16 holds every int8 and e4m3 number exactly. Dividing by the largest element keeps the query in its range.
        most = tl.max(tl.abs(q.to(tl.float32)), 1)
        if REST:
            most = tl.maximum(most, tl.max(tl.abs(q_rest.to(tl.float32)), 1))
            q_rest = (q_rest / tl.maximum(most, 1e-30)[:, None]).to(tl.float16)
        most = tl.maximum(most, 1e-30)
        q = (q / most[:, None]).to(tl.float16)
        factor *= most
    if IS_FIXED:
        factor *= tl.load(key_scale + group * ks_g)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total, result = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, V], tl.float32)
    # Shares differ by at most one tile. Equal ones would have to be rounded up, and leave processors without work.
    end = tl.minimum((split + 1) * tiles // splits * TOKENS, tokens)
    for first in range(split * tiles // splits * TOKENS, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_token = token < end
        unit, place = start, token.to(tl.int64)
        if PAGE:
            unit = tl.load(table + sequence * table_b + token // PAGE, mask=is_token, other=0).to(tl.int64)
            place = (token % PAGE).to(tl.int64)
        k_at = key + (group * k_g + unit * k_b + place * k_s)[:, None]
        k = _widened(tl.load(k_at + front, mask=is_token[:, None] & (front < FRONT_WIDTH), other=0.0), q.dtype)
        scores = tl.dot(q, tl.trans(k))
        if REST:
            k_rest = tl.load(k_at + rest, mask=is_token[:, None] & (rest < K_WIDTH), other=0.0)
            scores = tl.dot(q_rest, tl.trans(_widened(k_rest, q.dtype)), scores)
        if IS_SCALED and not IS_FIXED:
            k_scale = tl.load(key_scale + group * ks_g + unit * ks_b + place * ks_s, mask=is_token, other=0.0)
            scores *= k_scale
        scores = tl.where(is_token, scores * factor[:, None], float("-inf"))
        # The scale of a row of V is part of its weight: 2 ** (score + log2(scale)). It is not in `total`.
        weighted = scores
        if IS_SCALED and not IS_FIXED:
            v_scale = k_scale
            if not IS_LATENT:
                v_scale = tl.load(value_scale + group * vs_g + unit * vs_b + place * vs_s, mask=is_token, other=0.0)
            weighted += tl.log2(tl.maximum(v_scale, 1e-30))
        larger = tl.maximum(largest, tl.max(weighted, 1))
        weights, shrink = tl.exp2(weighted - larger[:, None]), tl.exp2(largest - larger)
        shares = tl.exp2(scores - larger[:, None]) if IS_SCALED and not IS_FIXED else weights
        total, largest = total * shrink + tl.sum(shares, 1), larger
        if IS_LATENT:
            v = k
        else:
            v_at = value + (group * v_g + unit * v_b + place * v_s)[:, None]
            v = _widened(tl.load(v_at + out, mask=is_token[:, None] & (out < V_WIDTH), other=0.0), q.dtype)
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None])
    if IS_FIXED:
        result *= tl.load(key_scale + group * ks_g if IS_LATENT else value_scale + group * vs_g)
    at = first_part * (tl.num_programs(0) // blocks * EACH) + head * splits + split
    tl.store(part + at[:, None] * V_WIDTH + out, result / total[:, None], mask=is_row & (out < V_WIDTH))
    tl.store(log_sum + at, largest + tl.log2(total), mask=row < EACH)


@triton.jit(do_not_specialize=["splits"])
def merge(
    part, log_sum, batch, out, splits,
    V_WIDTH: tl.constexpr, ELEMENTS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The mean of a head's parts, weighted by their sums of weights. It reads `PARTS` of them at a time.

    A sequence of different length than the others has its own number of parts, in `batch`, and `EACH` heads.
    """
    row, element = tl.program_id(0).to(tl.int64), tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    before = row * splits
    if EACH:
        first_part = tl.load(batch + row // EACH)
        splits = tl.load(batch + row // EACH + 1) - first_part
        before = first_part.to(tl.int64) * EACH + row % EACH * splits
    largest, total, result = float("-inf"), 0.0, tl.zeros([ELEMENTS], tl.float32)
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        logs = tl.load(log_sum + before + split, mask=split < splits, other=float("-inf"))
        larger = tl.maximum(largest, tl.max(logs))
        weights, shrink = tl.exp2(logs - larger), tl.exp2(largest - larger)
        at = part + (before + split)[:, None] * V_WIDTH + element
        parts = tl.load(at, mask=(split < splits)[:, None] & (element < V_WIDTH), other=0.0)
        result = result * shrink + tl.sum(parts * weights[:, None], 0)
        total, largest = total * shrink + tl.sum(weights), larger
    tl.store(out + row * V_WIDTH + element, result / total, mask=element < V_WIDTH)


def tile(architecture: int, each: int, row_width: int, is_latent: bool, is_paged: bool, is_scaled: bool) -> Tile:
    """The tile for `each` query heads per KV head, and `row_width` elements of K and V (or of the latent) per token.

    `architecture` is CUDA's compute capability times ten, or 0 for ROCm. All tiles fit the shared memory of a thread
    block: 227 KiB on 90 and 100, 99 on consumer GPUs, 64 on ROCm. All but the one for 8-bit latents on Hopper compile
    without spilled registers.
    """
    heads = max(16, triton.next_power_of_2(each))
    # The number of a page must be read before its rows, so loads begin earlier.
    ahead = 1 if is_paged and architecture else 0
    if is_latent:
        if architecture == 90:
            # The matrix instructions of Hopper take 64 rows. In 8 bits, 300 bytes of a thread's registers are spilled,
            # and it is still 1.6 to 1.8 times as fast on an H200 as the tiles below.
            return Tile(min(heads, 64), 64, 8, 2 + ahead, 1)
        warps, tokens = (8, 32) if architecture else (4, 16 if is_scaled else 32)
        return Tile(min(heads, 32), tokens, warps, 2 + ahead, 1)
    if architecture == 0:
        return Tile(min(heads, 32), 32 if is_scaled or row_width > 256 else 64, 4, 2, 2)
    # Blackwell's compiler keeps to 128 registers here, which are too few for 64 tokens in 8 bits.
    is_narrow = architecture >= 100 and is_scaled
    tokens = min(32 if is_narrow else 64, max(16, triton.next_power_of_2(16384 // row_width + 1) // 2))
    if architecture == 90 and is_scaled and heads == 16:
        # Small blocks, so that some convert rows while others wait for theirs: 1.4 to 1.7 times as fast on an H200 as
        # the tile below.
        return Tile(16, tokens, 2, 4 + ahead, 4)
    return Tile(min(heads, 64), tokens, 4, 3 + is_narrow + 2 * ahead, 2)


@lru_cache
def parts(blocks: int, tiles: int, at_once: int) -> int:
    """Into how many parts to split `tiles`, so that `blocks` thread blocks per part fill a device of `at_once`.

    Among the numbers that leave at most 5% of the device idle, this is the smallest with the shortest time: in each
    round, the tiles of the largest part, and the start and the end of a block, which take as long as one tile.
    """

    def use(count: int) -> float:
        return blocks * count / (-(-blocks * count // at_once) * at_once)

    def time(count: int) -> int:
        return -(-blocks * count // at_once) * (-(-tiles // count) + 1)

    counts = range(1, max(1, min(at_once, tiles)) + 1)
    enough = min(0.95, max(map(use, counts)))
    return min((count for count in counts if use(count) >= enough), key=time)


@lru_cache
def ragged_parts(blocks: int, tiles: tuple[int, ...], at_once: int) -> tuple[int, ...]:
    """Into how many parts to split the tiles of each sequence. See `parts`; a device takes parts as it finishes others.

    No part has more tiles than a number that is chosen for the shortest time: all tiles, and one more for the start and
    the end of each part, shared by `at_once` places, and the longest part, which may begin last.
    """

    def count(most: int) -> tuple[int, ...]:
        return tuple(max(1, -(-each // most)) for each in tiles)

    def time(most: int) -> float:
        return blocks * (sum(tiles) + sum(count(most))) / at_once + most

    sizes = {max(1, -(-max(tiles) // number)) for number in range(1, min(at_once, max(tiles)) + 1)}
    return count(min(sizes, key=time))


def ragged(counts: tuple[int, ...], lengths: tuple[int, ...], starts: tuple[int, ...]) -> tuple[int, ...]:
    """For B sequences: B + 1 numbers of their first parts, B lengths, B first rows, and the sequence of each part."""
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    return (0, *accumulate(counts), *lengths, *starts, *owners)


def merged_at_once(splits: int, architecture: int) -> int:
    """How many parts `merge` reads at a time. Each round waits for memory, and ROCm's registers hold 32 parts."""
    if splits > 48 and architecture:
        return 64
    return 32 if splits > 16 else 16


@lru_cache
def device_of(device: torch.device) -> tuple[int, int]:
    """The architecture as in `tile`, and the number of processors. Triton's interpreter runs on a CPU."""
    if device.type != "cuda":
        return 0, 4
    properties = torch.cuda.get_device_properties(device)
    return 0 if torch.version.hip else properties.major * 10 + properties.minor, properties.multi_processor_count


def decode(
    query: Tensor, rows: tuple[Tensor, ...], scales: tuple[Tensor, ...], table: Tensor | None, tokens: int,
    scale: float, v_width: int | None = None, lengths: tuple[int, ...] = (), starts: tuple[int, ...] = (),
    is_fixed: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of `query` (B, H, 1, d) over the first `tokens` rows of each sequence. Returns (B, H, 1, V's width).

    `rows` are K and V, or the latent alone if `v_width` is given. They are (B, G, s, width), or with a `table` pools
    (blocks, tokens, G, width). `scales` have a width of 1. There are none if `rows` are fp16 or bf16. If `is_fixed`,
    they are the same for all rows of a head.

    With `lengths`, sequence b has lengths[b] tokens instead, and without a table the rows are pools (rows, G, width),
    in which it begins at row starts[b].
    """
    architecture, processors = device_of(query.device)
    batch, heads, _, width = query.shape
    packed = bool(lengths) and table is None
    # The dimensions of sequences or pages (of rows, if they are packed), heads and tokens.
    axes = (0, 1, 0) if packed else (0, 1, 2) if table is None else (0, 2, 1)
    if rows[0].dtype == torch.float8_e4m3fn and architecture < 89:
        rows = tuple(row.view(torch.uint8) for row in rows)
    key, value = rows[0], rows[-1]
    key_scale, value_scale = (scales[0], scales[-1]) if scales else (query, query)
    groups, is_latent = key.shape[axes[1]], v_width is not None
    v_width = value.shape[-1] if v_width is None else v_width
    each = heads // groups
    row_width = width if is_latent else width + v_width
    sizes = tile(architecture, each, row_width, is_latent, table is not None, bool(scales))
    blocks, at_once = groups * triton.cdiv(each, sizes.heads), processors * sizes.per_processor
    tiles = triton.cdiv(tokens, sizes.tokens)
    if lengths:
        counts = ragged_parts(blocks, tuple(triton.cdiv(each, sizes.tokens) for each in lengths), at_once)
        splits, sequences = sum(counts), 1
        shares = on_device(ragged(counts, lengths, starts[:batch] if packed else (0,) * batch), query.device)
    else:
        splits, sequences, shares = parts(batch * blocks, tiles, at_once), batch, query
    part, log_sum = parts_of(sequences * heads * splits, query, v_width)
    strides = [tensor.stride(axis) for tensor in (key, value, key_scale, value_scale) for axis in axes]
    attend[blocks, splits, sequences](
        query, key, value, key_scale, value_scale, query if table is None else table, shares, part, log_sum,
        scale * LOG2_E, tokens, tiles, query.stride(0), query.stride(1), *strides,
        0 if table is None else table.stride(0), **widths(each, width, v_width, is_latent),
        PAGE=0 if table is None else key.shape[1], IS_SCALED=bool(scales), IS_FIXED=bool(scales) and is_fixed,
        RAGGED=len(lengths), HEADS=sizes.heads, TOKENS=sizes.tokens, num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return merged(query, part, log_sum, splits, shares if lengths else None)


def parts_of(count: int, query: Tensor, v_width: int) -> tuple[Tensor, Tensor]:
    """Memory for `count` parts of the output, and for the logarithms of their sums of weights."""
    # Parts are means, so 16 bits round them like the output, and merging reads half as much.
    part = torch.empty(count, v_width, dtype=query.dtype, device=query.device)
    return part, torch.empty(count, dtype=torch.float32, device=query.device)


def merged(query: Tensor, part: Tensor, log_sum: Tensor, splits: int, shares: Tensor | None = None) -> Tensor:
    """The output (B, H, 1, V's width) of the parts of `query`: `splits` of each head, or what `ragged` says."""
    batch, heads = query.shape[:2]
    v_width = part.shape[1]
    out = torch.empty(batch, heads, 1, v_width, dtype=query.dtype, device=query.device)
    merge[batch * heads, triton.cdiv(v_width, _ELEMENTS)](
        part, log_sum, query if shares is None else shares, out, splits, V_WIDTH=v_width, ELEMENTS=_ELEMENTS,
        PARTS=merged_at_once(splits, device_of(query.device)[0]), EACH=0 if shares is None else heads,
    )  # fmt: skip
    return out


def widths(each: int, k_width: int, v_width: int, is_latent: bool) -> dict[str, Any]:
    """The constants of `attend` that follow from the heads. The front of K is V, or the largest power of 2 in K."""
    front = v_width if is_latent else 1 << (k_width.bit_length() - 1)
    rest = 0 if front == k_width else max(16, triton.next_power_of_2(k_width - front))
    return {
        "EACH": each, "FRONT": max(16, triton.next_power_of_2(front)), "REST": rest, "K_WIDTH": k_width,
        "FRONT_WIDTH": front, "V": max(16, triton.next_power_of_2(v_width)), "V_WIDTH": v_width, "IS_LATENT": is_latent,
    }  # fmt: skip
