"""The parts of an engine's account: the lines of a request's bytes, and the figures of a pool of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.model.tensors import ModelWeights

# The name of every line in the engines' accounts, in display order.
_LINES = (
    "stored", "window cells beyond the window", "in-flight tokens beyond the window", "longest encoder input",
    "windows kept whole", "window pool beyond the windows", "K and V beyond the latent", "V of the indexer",
    "pooled keys of the indexer", "token numbers, with the cells", "encoder K and V, recomputed",
    "different layout or dtype", "unused rows", "blocks rounded up", "pages rounded up", "cells rounded up",
    "entry cells rounded up", "full compressor states in fp32", "tokens required by the window pool's ratio",
    "dummy page", "one extra block per window",
    "states for prefixes and drafts", "pages padded to one size", "blocks padded to the largest group",
    "states beyond the batch", "dummy state", "request table", "slots beyond the batch", "states in fp32",
    "V padded to the widest layer's", "states for checking drafts", "convolution inputs for checking drafts",
    "caches that no layer reads", "memory pages rounded up", "pools in a fixed proportion", "prefix kept once",
)  # fmt: skip
_ORDER = {name: place for place, name in enumerate(_LINES)}


class Line(NamedTuple):
    """A named part of a request's bytes. The bytes are negative if an engine keeps less than the formula stores."""

    name: str
    bytes: int


def lines_of(sizes: Mapping[str, int]) -> list[Line]:
    """The parts of an account in the order of `_LINES`, without parts of 0 bytes."""
    return [Line(name, sizes[name]) for name in sorted(filter(sizes.get, sizes), key=_ORDER.__getitem__)]


class BatchLine(NamedTuple):
    """The bytes of a batch on one rank: `fixed_bytes`, and `bytes_of_each` for every sequence.

    `start_bytes` are the bytes that the engine requires on a device before it starts (`Engine.start_bytes`).
    """

    fixed_bytes: int
    bytes_of_each: int
    start_bytes: int = 0


class BlockPool(NamedTuple):
    """The figures an engine with blocks prints for its pool on one device.

    The last three are None if the memory for the cache is not known.
    """

    block_size: int
    bytes_per_block: int
    request_bytes: int
    num_gpu_blocks: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None


class PoolFigures(NamedTuple):
    """What an engine prints about its memory for caches: the pool, None without blocks, and figures of its own."""

    pool: BlockPool | None = None
    own: Mapping[str, object] = {}

    def describe(self) -> dict[str, object]:
        """The figures by their keys in the document."""
        return {**({} if self.pool is None else self.pool._asdict()), **self.own}


class DeviceDefault(NamedTuple):
    """The default of an engine's option on some devices, which are named in words."""

    option: str
    value: str
    devices: str


class DividedRows(NamedTuple):
    """The weights on each device, and the rows of a tied output head on each."""

    parts: list[ModelWeights]
    head_rows: list[int]


class AutoContext(NamedTuple):
    """How an engine chooses its context: the longest one, up to `most_tokens`, for `sequences` sequences.

    `margin_bytes` stay free on every device, which `margin_reason` says in words. A context below the model's own is
    rounded down to a multiple of `step_tokens`, and is at least `least_tokens`, for which `least_reason` is in words.
    """

    most_tokens: int
    sequences: int = 1
    margin_bytes: int = 0
    margin_reason: str = ""
    step_tokens: int = 1
    least_tokens: int = 1
    least_reason: str = ""


class RunningPool(NamedTuple):
    """The blocks of one device while requests run, for a simulation of the scheduler.

    There are `capacity` blocks, None if memory sets no limit. `table[n]` is the number of blocks of a request that
    decodes and has `n * block_tokens` tokens; beyond the table, it does not fit. `prompt_table` is the same while the
    prompt is computed, None if that takes no more.
    """

    capacity: int | None
    block_tokens: int = 1
    table: Sequence[int] = ()
    prompt_table: Sequence[int] | None = None


def block_table(blocks: Callable[[int], int], size: int, numbers: int, capacity: int) -> list[int]:
    """The blocks of a request with 0 to `numbers` blocks of `size` tokens, up to the first one that does not fit."""
    table = [0]
    for number in range(1, numbers + 1):
        table.append(blocks(number * size))
        if table[-1] > capacity:
            break
    return table


class PoolLimit(NamedTuple):
    """The bytes for the cache that an engine's `option` allows. If `is_exact`, the cache always takes this much."""

    option: str
    bytes: int
    is_exact: bool = False
