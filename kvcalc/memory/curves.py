"""A cache's bytes as a piecewise linear function of the context.

Every kind of cache except compressed attention stores `coefficient x min(tokens, cap)` bytes, or a constant. The sum
over the layers is linear between two caps, so each context costs one product and one sum instead of a dozen steps.
The results are exactly the integers that the formulas give.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, checked_caches, read_cache_bytes, sequence_bytes, stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

_Tokens = TypeVar("_Tokens", int, float)


class Curve(NamedTuple):
    """Bytes of one sequence in all layers: `fixed[i] + slopes[i] * tokens` from `starts[i]` tokens onwards."""

    starts: tuple[int, ...]
    fixed: tuple[int, ...]
    slopes: tuple[int, ...]

    def bytes_at(self, tokens: _Tokens) -> _Tokens:
        """Bytes of a sequence of `tokens` tokens (at least 1). A mean number of tokens gives the mean bytes."""
        piece = bisect_right(self.starts, tokens) - 1
        return self.fixed[piece] + self.slopes[piece] * tokens

    def growth_at(self, tokens: int) -> Growth:
        """The bytes one more token adds, and the bytes that do not grow, at `tokens` tokens."""
        piece = bisect_right(self.starts, tokens) - 1
        return Growth(self.slopes[piece], self.fixed[piece])


@remembered
def stored_curve(spec: ModelSpec, dtype: Dtype) -> Curve | None:
    """The curve of the stored bytes (`sequence_bytes`), or None if they are not linear between caps.

    Raises UsageError if the dtype's blocks do not divide a token's row.
    """
    return _curve(spec, dtype, stored_cache_bytes, lambda cache: cache.window)


@remembered
def read_curve(spec: ModelSpec, dtype: Dtype) -> Curve | None:
    """The curve of the bytes one decode step reads, or None if they are not linear between caps."""
    return _curve(spec, dtype, read_cache_bytes, most_read)


def stored_sequence_bytes(spec: ModelSpec, dtype: Dtype, tokens: int) -> int:
    """Like `kv_cache.sequence_bytes`, but uses the curve if there is one."""
    curve = stored_curve(spec, dtype)
    return sequence_bytes(spec, dtype, tokens) if curve is None else curve.bytes_at(tokens)


def read_sequence_bytes(spec: ModelSpec, dtype: Dtype, tokens: int) -> int:
    """Bytes of one sequence's cache that one decode step reads. Uses the curve if there is one."""
    curve = read_curve(spec, dtype)
    return sequence_bytes(spec, dtype, tokens, read_cache_bytes) if curve is None else curve.bytes_at(tokens)


def most_read(cache: Cache) -> int | None:
    """The most tokens of a cache that one step reads, or None if it reads all of them."""
    caps = (cache.window, getattr(cache, "most_read_tokens", None))
    return min((cap for cap in caps if cap is not None), default=None)


class SizedCache(NamedTuple):
    """A distinct cache of a model, and the number of layers that have it. `curve` is None if it is not linear."""

    cache: Cache
    num_layers: int
    curve: Curve | None

    def stored_bytes(self, tokens: int, dtype: Dtype) -> int:
        """Like `stored_cache_bytes`, for the dtype of the curve."""
        return stored_cache_bytes(self.cache, tokens, dtype) if self.curve is None else self.curve.bytes_at(tokens)


@remembered
def sized_caches(spec: ModelSpec, dtype: Dtype) -> list[SizedCache]:
    """The distinct caches of a model with the curve of each. UsageError as in `stored_curve`."""
    return [sized_cache(cache, count, dtype) for cache, count in checked_caches(spec, dtype)]


def sized_cache(cache: Cache, num_layers: int, dtype: Dtype) -> SizedCache:
    """A cache that `num_layers` layers have, with its curve in one layer."""
    if isinstance(cache, CompressedAttention):
        return SizedCache(cache, num_layers, None)
    return SizedCache(cache, num_layers, _sum_of([(cache, 1)], dtype, stored_cache_bytes, lambda found: found.window))


def _curve(
    spec: ModelSpec, dtype: Dtype, count: Callable[[Cache, int, Dtype], int], cap_of: Callable[[Cache], int | None]
) -> Curve | None:
    caches = checked_caches(spec, dtype)
    if any(isinstance(cache, CompressedAttention) for cache, _ in caches):
        return None
    return _sum_of(caches, dtype, count, cap_of)


def _sum_of(
    caches: Sequence[tuple[Cache, int]], dtype: Dtype, count: Callable[[Cache, int, Dtype], int],
    cap_of: Callable[[Cache], int | None],
) -> Curve:  # fmt: skip
    """The curve of caches with the numbers of layers that have them."""
    constant = 0
    slopes: dict[int | None, int] = {}  # keyed by the cap up to which the slope applies
    for cache, num_layers in caches:
        # The bytes of one token are the constant or the coefficient, because no cap is below 1.
        one = num_layers * count(cache, 1, dtype)
        if isinstance(cache, (RecurrentState, CrossAttention)):
            constant += one
        else:
            cap = cap_of(cache)
            slopes[cap] = slopes.get(cap, 0) + one
    caps = sorted(cap for cap in slopes if cap is not None)
    starts = (0, *caps)
    return Curve(
        starts,
        tuple(constant + sum(cap * slopes[cap] for cap in caps if cap <= start) for start in starts),
        tuple(sum(slope for cap, slope in slopes.items() if cap is None or cap > start) for start in starts),
    )
