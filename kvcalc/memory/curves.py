"""A cache's bytes as a piecewise linear function of the context.

Every kind of cache except compressed attention stores `coefficient x min(tokens, cap)` bytes, or a constant. The sum
over the layers is linear between two caps, so each context costs one product and one sum instead of a dozen steps.
The results are exactly the integers that the formulas give.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, checked_caches, sequence_bytes, stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

Tokens = TypeVar("Tokens", int, float)


class Curve(NamedTuple):
    """Bytes of one sequence in all layers: `fixed[i] + slopes[i] * tokens` from `starts[i]` tokens onwards."""

    starts: tuple[int, ...]
    fixed: tuple[int, ...]
    slopes: tuple[int, ...]

    def bytes_at(self, tokens: Tokens) -> Tokens:
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
    caches = checked_caches(spec, dtype)
    return None if any(isinstance(cache, CompressedAttention) for cache, _ in caches) else _stored(caches, dtype)


def stored_sequence_bytes(spec: ModelSpec, dtype: Dtype, tokens: int) -> int:
    """Like `kv_cache.sequence_bytes`, but uses the curve if there is one."""
    curve = stored_curve(spec, dtype)
    return sequence_bytes(spec, dtype, tokens) if curve is None else curve.bytes_at(tokens)


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
    return SizedCache(cache, num_layers, _stored([(cache, 1)], dtype))


def _stored(caches: Sequence[tuple[Cache, int]], dtype: Dtype) -> Curve:
    """The stored bytes of caches with the numbers of layers that have them."""
    return curve_of((cache, count * stored_cache_bytes(cache, 1, dtype), cache.window) for cache, count in caches)


def curve_of(caches: Iterable[tuple[Cache, int, int | None]]) -> Curve:
    """The curve of caches: each with its bytes at one token, and the tokens up to which they grow (None: always)."""
    constant = 0
    slopes: dict[int | None, int] = {}
    for cache, size, cap in caches:
        # The bytes of one token are the constant or the coefficient, because no cap is below 1.
        if isinstance(cache, (RecurrentState, CrossAttention)):
            constant += size
        else:
            slopes[cap] = slopes.get(cap, 0) + size
    caps = sorted(cap for cap in slopes if cap is not None)
    starts = (0, *caps)
    return Curve(
        starts,
        tuple(constant + sum(cap * slopes[cap] for cap in caps if cap <= start) for start in starts),
        tuple(sum(slope for cap, slope in slopes.items() if cap is None or cap > start) for start in starts),
    )
