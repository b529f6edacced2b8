"""A cache's bytes over the context as straight pieces: what takes a formula a dozen steps is one product and one sum.

Every kind of cache but compressed attention stores `coefficient x min(tokens, cap)` bytes, or a constant. The sum over
layers is straight between two caps, so that a million contexts cost a million products. The integers are the formula's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, checked_caches, read_cache_bytes, sequence_bytes, stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention, RecurrentState
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec

_Tokens = TypeVar("_Tokens", int, float)


class Curve(NamedTuple):
    """Bytes of one sequence in all layers: `fixed[i] + slopes[i] * tokens` from `starts[i]` tokens on."""

    starts: tuple[int, ...]
    fixed: tuple[int, ...]
    slopes: tuple[int, ...]

    def bytes_at(self, tokens: _Tokens) -> _Tokens:
        """Bytes of a sequence of `tokens` tokens, at least 1; of a mean number of tokens the mean."""
        piece = bisect_right(self.starts, tokens) - 1
        return self.fixed[piece] + self.slopes[piece] * tokens

    def growth_at(self, tokens: int) -> Growth:
        """What one more token adds, and what of the bytes does not grow: a piece's own two numbers."""
        piece = bisect_right(self.starts, tokens) - 1
        return Growth(self.slopes[piece], self.fixed[piece])


@remembered
def stored_curve(spec: ModelSpec, dtype: Dtype) -> Curve | None:
    """What the formula stores (`sequence_bytes`); None where it is not straight between caps.

    Raises UsageError where the dtype's blocks do not divide a token's row.
    """
    return _curve(spec, dtype, stored_cache_bytes, lambda cache: cache.window)


@remembered
def read_curve(spec: ModelSpec, dtype: Dtype) -> Curve | None:
    """What one decode step reads; None where it is not straight between caps."""
    return _curve(spec, dtype, read_cache_bytes, most_read)


def stored_sequence_bytes(spec: ModelSpec, dtype: Dtype, tokens: int) -> int:
    """`kv_cache.sequence_bytes` by the curve, where there is one."""
    curve = stored_curve(spec, dtype)
    return sequence_bytes(spec, dtype, tokens) if curve is None else curve.bytes_at(tokens)


def read_sequence_bytes(spec: ModelSpec, dtype: Dtype, tokens: int) -> int:
    """What one decode step reads of one sequence's cache, by the curve where there is one."""
    curve = read_curve(spec, dtype)
    return sequence_bytes(spec, dtype, tokens, read_cache_bytes) if curve is None else curve.bytes_at(tokens)


def most_read(cache: Cache) -> int | None:
    """Tokens of a cache one step reads at most; None where it reads all."""
    caps = (cache.window, getattr(cache, "most_read_tokens", None))
    return min((cap for cap in caps if cap is not None), default=None)


def _curve(
    spec: ModelSpec, dtype: Dtype, count: Callable[[Cache, int, Dtype], int], cap_of: Callable[[Cache], int | None]
) -> Curve | None:
    constant = 0
    slopes: dict[int | None, int] = {}  # by the cap up to which they hold
    for cache, num_layers in checked_caches(spec, dtype):
        if isinstance(cache, CompressedAttention):
            return None
        # Of one token: the constant, or the coefficient, since no cap is below 1.
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
