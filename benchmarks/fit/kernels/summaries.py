"""Summaries of tables of kernel latencies: one function per kind of kernel.

Each function takes a `Table` and returns rows: its device, engine and release, then the values that the list of
columns above the function names. The bytes and operations are the ideal ones: weights and activations once, the cache
once, causal attention over half of the square.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.fit.kernels.columns import BITS, COPIES, Row, Table, between, constants, microseconds, short_name
from benchmarks.fit.kernels.fits import Array, fit_roofline, fit_sum, middle, quantile

GEMM = (
    "dtype launch_us overhead_m16 overhead_m32 overhead_m64 overhead_m128 overhead_m256 "
    "efficiency_m1024 efficiency_m2048 efficiency_m8192 fixed_us read_factor efficiency power spread wide_spread rows"
).split()


def gemm(table: Table) -> list[Row]:
    """Dense layers by dtype.

    `launch_us` is the time of products so small that nothing else takes time. An overhead is measured seconds over
    nominal seconds of the bytes, up to m rows, for weights beyond the cache. An efficiency is the share of the dense
    peak at about m rows. The last columns are a fit of fixed + (read^p + compute^p)^(1/p).
    """
    rows = []
    for (dtype,), part in table.groups("gemm_dtype"):
        peak = table.peak(dtype)
        if dtype not in BITS or not peak:
            continue
        m, n, k, seconds = part.number("m"), part.number("n"), part.number("k"), part.seconds
        weights = n * k * BITS[dtype] / 8
        read = (weights + 2 * m * k + 2 * m * n) / table.device.bandwidth
        compute = 2 * m * n * k / peak
        copies = 1 if table.engine == "vllm" and dtype in ("fp8_block", "nvfp4") else COPIES.get(table.engine, 1)
        cache = table.device.l2_bytes
        outside = (weights * copies > 2 * cache) & (weights > 0.5 * cache) & (weights < 1.5e9)
        usual = between(n, 1024, 32768) & between(k, 1024, 32768) & (weights > 1.5e7)
        overheads = [
            middle((seconds / read)[outside & (weights > 1.5 * cache) & between(m, low, high)])
            for low, high in ((1, 16), (17, 32), (33, 64), (65, 128), (129, 256))
        ]
        shares = [
            middle((compute / seconds)[usual & between(m, low, high)])
            for low, high in ((512, 1024), (1025, 2048), (4096, 8192))
        ]
        chosen = outside | (usual & (m >= 2048))
        fit = fit_roofline(seconds[chosen], read[chosen], compute[chosen])
        launch = quantile(seconds[(m <= 64) & (weights < 2e6)], 0.25)
        if fit is None:
            continue
        rows.append([*table.head, dtype, microseconds(launch), *overheads, *shares, *constants(fit, 1, power=True)])
    return rows


DECODE_ATTENTION = (
    "kv_dtype head_dim window launch_us overhead us_1k us_8k us_128k fixed_us read_factor nanoseconds_per_kv_head "
    "nanoseconds_per_token spread wide_spread rows"
).split()


def decode_attention(table: Table) -> list[Row]:
    """One step of grouped attention.

    The fit is fixed + read_factor * bytes / bandwidth + a cost per KV head of each sequence + a cost per token of one
    sequence, which is not split further. `overhead` is measured seconds over nominal seconds for caches beyond eight
    times the L2 cache; below 1, the table repeats cached data and tells nothing about reads. `us_8k` is the time of
    one sequence with at most 8 KV heads and 8,192 tokens.
    """
    rows = []
    for (dtype, head_dim, window), part in table.groups("kv_cache_dtype", "head_dim", "window_size"):
        # Other sizes of heads are much alike, and a window of 8,192 tokens is like full attention.
        if (head_dim, window or "0") not in (("128", "0"), ("64", "128")):
            continue
        batch, heads, tokens = part.number("batch_size"), part.number("num_key_value_heads"), part.number("step") + 1
        seen = np.minimum(tokens, float(window)) if window not in ("", "0") else tokens
        element = 1 if "fp8" in dtype else 2
        cache_bytes = batch * seen * heads * float(head_dim) * 2 * element
        read, seconds, cache = cache_bytes / table.device.bandwidth, part.seconds, table.device.l2_bytes
        # Between these sizes, the repeated cache is partly in L2, as it never is in a server.
        outside = ((cache_bytes > 2 * cache) | (cache_bytes < 0.15 * cache)) & (heads <= 16)
        terms = [read, batch * heads * 1e-9, seen * 1e-9]
        fit = fit_sum(
            seconds[outside],
            [term[outside] for term in terms],
            bounds=[(1, 30), (0.1, 2000), (0.01, 200)],
            share=0.3,
        )
        if fit is None:
            continue
        single = (batch == 1) & (heads <= 8)
        lengths = [
            middle(seconds[single & between(tokens, 0.85 * length, 1.15 * length)], 2)
            for length in (1024, 8192, 131072)
        ]
        launch = quantile(seconds[(batch <= 4) & (tokens <= 256)], 0.25)
        overhead = middle((seconds / read)[cache_bytes > 8 * cache])
        rows.append(
            [
                *(*table.head, dtype, int(head_dim), int(window or 0)),
                *(microseconds(launch), overhead, *map(microseconds, lengths)),
                *constants(fit),
            ]
        )
    return rows


PREFILL_ATTENTION = (
    "query_dtype kv_dtype head_dim launch_us efficiency_1k efficiency_4k efficiency_16k "
    "fixed_us read_factor efficiency spread wide_spread rows"
).split()


def prefill_attention(table: Table) -> list[Row]:
    """Attention of a whole prompt.

    The fit is fixed + read_factor * (bytes of Q, K, V and the output) / bandwidth + operations / (efficiency * peak),
    so the share of the peak grows with the length of the prompt.
    """
    rows = []
    names = ("attn_dtype", "kv_cache_dtype", "head_dim", "window_size")
    for (query, dtype, head_dim, window), part in table.groups(*names):
        peak = table.device.peaks.get("fp8" if "fp8" in query else "bf16")
        if head_dim not in ("64", "128") or window not in ("", "0") or not peak:
            continue
        batch, heads, tokens = part.number("batch_size"), part.number("num_heads"), part.number("isl")
        seconds, cached = part.seconds, part.number("num_key_value_heads")
        compute = 4 * batch * heads * float(head_dim) * tokens**2 / 2 / peak
        read = batch * tokens * float(head_dim) * 2 * (2 * heads + 2 * cached) / table.device.bandwidth
        fit = fit_sum(seconds, [read, compute], bounds=[(1, 30), (1, 50)])
        if fit is None:
            continue
        shares = [
            middle((compute / seconds)[between(tokens, low, high) & (batch * heads * tokens >= 2**16)])
            for low, high in ((512, 1024), (2049, 4096), (8193, 20000))
        ]
        launch = quantile(seconds[(batch <= 2) & (tokens <= 64)], 0.25)
        rows.append(
            [*table.head, query, dtype, int(head_dim), microseconds(launch), *shares, *constants(fit, efficiency=1)]
        )
    return rows


DECODE_MLA = ("kv_dtype launch_us overhead fixed_us read_factor efficiency power spread wide_spread rows").split()
_LATENT, _ROPE = 512, 64


def decode_mla(table: Table) -> list[Row]:
    """One step of latent attention alone, without its projections: a roofline of the latent's bytes and operations."""
    rows = []
    for (dtype,), part in table.groups("kv_cache_dtype"):
        batch, heads, tokens = part.number("batch_size"), part.number("num_heads"), part.number("step") + 1
        cache_bytes = batch * tokens * (_LATENT + _ROPE) * (1 if "fp8" in dtype else 2)
        read, seconds, cache = cache_bytes / table.device.bandwidth, part.seconds, table.device.l2_bytes
        compute = 2 * batch * heads * tokens * (2 * _LATENT + _ROPE) / table.device.peaks["bf16"]
        outside = (cache_bytes > 2 * cache) | (cache_bytes < 0.15 * cache)
        fit = fit_roofline(seconds[outside], read[outside], compute[outside])
        if fit is None:
            continue
        launch = quantile(seconds[(batch <= 4) & (tokens <= 256)], 0.25)
        overhead = middle((seconds / read)[(cache_bytes > 4 * cache) & (heads <= 32)])
        rows.append([*table.head, dtype, microseconds(launch), overhead, *constants(fit, 1, power=True)])
    return rows


EXPERTS = (
    "dtype kernel launch_us overhead_n16 overhead_n64 efficiency_t128 efficiency_t512 skew_n64 skew_n512 skew_more "
    "fixed_us read_factor activation_factor efficiency spread wide_spread rows"
).split()
# The models whose experts have two matrices (no gate): Nemotron 3, known by their hidden size or experts per token.
_TWO_MATRICES = {"hidden_size": 2688, "topk": 22}


def experts(table: Table) -> list[Row]:
    """The experts of one layer on one device: routing, both products and the combination.

    The tables spread tokens evenly ("balanced"), so min(E, n k) experts are read. The fit is fixed + read_factor *
    weights + activation_factor * activations (k (2 hidden + 3 intermediate) + 2 hidden elements per token) +
    operations / (efficiency * peak). `efficiency_t512` is the share of the peak with 256 to 512 tokens per expert,
    `skew_n64` the time with a power-law distribution over the even one with 16 to 64 tokens.
    """
    rows = []
    for (dtype, kernel), part in table.groups("moe_dtype", "kernel_source"):
        peak = table.peak(dtype)
        if dtype not in BITS or not peak:
            continue
        names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
        tokens, hidden, inter, chosen, total, tensor, expert = (part.number(name) for name in names)
        seconds, even = part.seconds, part.text("distribution") == "balanced"
        two = (hidden == _TWO_MATRICES["hidden_size"]) | (chosen == _TWO_MATRICES["topk"])
        touched = np.minimum(total, tokens * chosen) / expert
        one = np.where(two, 2, 3) * hidden * inter / tensor
        weights = touched * one * BITS[dtype] / 8
        activations = tokens * chosen / expert * (2 * hidden + 3 * inter / tensor) * 2 + tokens * hidden * 4
        read, moved = weights / table.device.bandwidth, activations / table.device.bandwidth
        compute = 2 * tokens * chosen / expert * one / peak
        cache = table.device.l2_bytes
        single = even & (expert == 1) & (one > 3e5)
        fitted = single & ((weights > 1.5 * cache) | (weights < 0.2 * cache))
        fit = fit_sum(
            seconds[fitted],
            [term[fitted] for term in (read, moved, compute)],
            bounds=[(1, 30), (0.5, 12), (1.1, 50)],
            share=0.25,
        )
        if fit is None or fit.rows < 100:
            continue
        outside = single & (weights > 1.5 * cache)
        overheads = [
            middle((seconds / read)[outside & between(tokens, low, high)]) for low, high in ((5, 16), (17, 64))
        ]
        load = tokens * chosen / total
        shares = [
            middle((compute / seconds)[single & (load >= low) & (load < high)]) for low, high in ((64, 128), (256, 512))
        ]
        launch = quantile(seconds[(tokens <= 4) & (weights < 2e7)], 0.25)
        skew = _skew(part, tokens, seconds, names)
        rows.append(
            [
                *(*table.head, dtype, short_name(kernel)),
                *(microseconds(launch), *overheads, *shares, *skew),
                *constants(fit, efficiency=2),
            ]
        )
    return rows


def _skew(part: Table, tokens: Array, seconds: Array, names: Sequence[str]) -> list[float | None]:
    """Seconds with the most skewed distribution over the even ones of the same shapes, by number of tokens."""
    spread = part.text("distribution")
    skewed = sorted(name for name in set(spread) if name.startswith("power_law"))
    if not skewed:
        return [None] * 3
    shapes = np.array([part.number(name) for name in names]).T
    even = {tuple(shape): second for shape, second in zip(shapes[spread == "balanced"], seconds[spread == "balanced"])}
    chosen = (spread == skewed[-1]) & (part.number("moe_ep_size") == 1)
    ratios = np.array(
        [second / even.get(tuple(shape), np.nan) for shape, second in zip(shapes[chosen], seconds[chosen])]
    )
    return [
        middle(ratios[between(tokens[chosen], low, high)]) if len(ratios) else None
        for low, high in ((16, 64), (128, 512), (1024, 1e9))
    ]
