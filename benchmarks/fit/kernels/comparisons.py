"""Tables of kernel latencies that need no fit: collectives by size, rarer kernels, and one release beside another.

The rows are those of summaries.py: device, engine and release, then the values that the columns name.
"""

from __future__ import annotations

import numpy as np

from benchmarks.fit.kernels.columns import Row, Table, between, microseconds, short_name
from benchmarks.fit.kernels.fits import middle, quantile

MESSAGE_BYTES = tuple(2**power for power in (13, 17, 19, 20, 22, 26))
COLLECTIVES = [
    *"operation variant devices launch_us link_share".split(),
    *(f"us_{size >> 10}K" if size < 2**20 else f"us_{size >> 20}M" for size in MESSAGE_BYTES),
]


def collectives(table: Table) -> list[Row]:
    """Collectives of 16-bit elements by message size (the whole buffer of a rank, before or after the operation).

    `launch_us` is the shortest time. `link_share` is the share of the link's rate that the largest message reaches:
    an all-reduce sends 2 (n - 1) / n of the buffer, the others (n - 1) / n.
    """
    rows = []
    variant = "backend" if "backend" in table.columns else "kernel_source"
    for (operation, name, devices), part in table.groups("op_name", variant, "num_gpus"):
        # Outside CUDA graphs, the host's time is measured.
        if "half" not in part.text("nccl_dtype", "half") or "eager" in name:
            continue
        halves = part.text("nccl_dtype", "half") == "half"
        sizes, seconds = part.number("message_size")[halves] * 2, part.seconds[halves]
        order = sorted(set(sizes))
        times = np.array([float(np.median(seconds[sizes == size])) for size in order])
        sent = (1 + (operation == "all_reduce")) * (int(devices) - 1) / int(devices)
        known = [
            microseconds(float(np.exp(np.interp(np.log(size), np.log(order), np.log(times)))))
            if order[0] <= size <= order[-1]
            else None
            for size in MESSAGE_BYTES
        ]
        share = sent * order[-1] / times[-1] / table.device.link
        rows.append([*table.head, operation, name, int(devices), microseconds(float(times.min())), share, *known])
    return rows


OTHER = "table operation kernel launch_us us_64 us_1024".split()
# How many tokens (or sequences) a row is about: the first of these columns that the table has.
_SIZES = ("num_tokens", "m", "num_token", "batch_size")


def other(table: Table, name: str) -> list[Row]:
    """Kernels and whole modules by number of tokens (or sequences): the shortest, at 64 and at about 1,024.

    Attention modules include their projections. Their times are those of contexts up to 8,192 tokens and one device.
    """
    rows = []
    size = next((column for column in _SIZES if column in table.columns), None)
    if size is None or "latency" not in table.columns:
        return []
    for (operation, kernel, phase), part in table.groups("op_name", "kernel_source", "phase"):
        if phase not in ("", "generation"):
            continue
        count, seconds = part.number(size), part.seconds
        kept = (part.number("step") <= 8192) & (part.number("k", 4096.0) <= 8192) & (seconds > 5e-7)
        if not kept.any():
            continue
        times = [quantile(seconds[kept & (count <= 4)], 0.25, 1)]
        times += [middle(seconds[kept & between(count, low, high)], 1) for low, high in ((64, 64), (1000, 1024))]
        rows.append([*table.head, name, operation, short_name(kernel), *map(microseconds, times)])
    return rows


RELEASES = "table dtype older ratio low_ratio high_ratio".split()


def release_ratio(older: Table, newer: Table, name: str, dtype: str) -> list[Row]:
    """Seconds of the older release over those of the newer one at the same shapes, if they differ by more than 10%.

    The ratios are the median and the 10th and 90th percentile.
    """
    ignored = {"framework", "version", "device", "kernel_source", "latency", "power"}
    shared = sorted((set(older.columns) & set(newer.columns)) - ignored)
    # Without the column, rows of the same shape are different measurements, such as inside and outside of graphs.
    if dtype not in shared:
        return []

    def by_shape(table: Table) -> dict[tuple[str, ...], float]:
        texts = [table.columns[column].astype(str) for column in shared]
        return dict(zip(zip(*texts), table.seconds))

    before, after = by_shape(older), by_shape(newer)
    same = [shape for shape in before if shape in after and after[shape] > 0]
    where = shared.index(dtype)
    rows = []
    for kind in sorted({shape[where] for shape in same}):
        ratios = np.array([before[shape] / after[shape] for shape in same if shape[where] == kind])
        limits = (quantile(ratios, 0.5, 20), quantile(ratios, 0.1, 20), quantile(ratios, 0.9, 20))
        if limits[0] is not None and abs(limits[0] - 1) > 0.1:
            rows.append([*newer.head, name, kind, older.release, *limits])
    return rows
