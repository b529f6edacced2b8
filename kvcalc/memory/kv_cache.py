"""The formulas: how many bytes attention must store, and how many bytes one decode step must read.

    stored = 2 x layers x batch x KV heads x tokens x head_dim x bytes_per_element          (MHA, GQA, MQA)
    stored = layers x batch x tokens x (kv_lora_rank + qk_rope_head_dim) x bytes_per_element  (MLA)

In layers with a sliding window, min(tokens, window) replaces `tokens`. The bytes an engine allocates are a different
quantity: see kvcalc.engines.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of, check_rows
from kvcalc.model.caches import (
    HEADS_CACHES,
    Cache,
    CompressedAttention,
    CrossAttention,
    RecurrentState,
    TokenCache,
    read_entries,
    share_of_device,
    stored_elements,
)
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, cache_runs, distinct_caches, map_caches
from kvcalc.records import NamedTuple

CountBytes = Callable[[Cache, int, Dtype], int]
"""Bytes that one sequence takes in one layer: (cache, tokens, dtype) -> bytes."""


def stored_cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
    """Bytes stored according to the formula. A state's convolution keeps the inputs before the current one."""
    if isinstance(cache, RecurrentState):
        return state_bytes(cache, cache.conv_kernel - 1, dtype)
    return _token_bytes(cache, tokens, dtype)


def entry_sizes(cache: Cache, dtype: Dtype) -> tuple[int, ...]:
    """Bytes of one entry in each part that a step reads (`caches.read_entries`), according to the formula."""
    if isinstance(cache, CompressedAttention):
        row = bytes_of(cache.head_dim, dtype)
        return (row, row, bytes_of(cache.index_head_dim, dtype))
    if isinstance(cache, CrossAttention):
        cache = cache._replace(encoder_tokens=1)
    return (stored_cache_bytes(cache, 1, dtype),)


def read_cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
    """Bytes one decode step reads, including the new token's own row. A state is read completely."""
    return sum(size * count for size, count in zip(entry_sizes(cache, dtype), read_entries(cache, tokens)))


def _token_bytes(cache: TokenCache, tokens: int, dtype: Dtype) -> int:
    """The bytes of the stored elements. K and V are counted separately if their types differ."""
    if dtype.v is None or not isinstance(cache, HEADS_CACHES):
        return bytes_of(stored_elements(cache, tokens), dtype)
    k, v = cache._replace(v_head_dim=0), cache._replace(k_head_dim=0)
    return bytes_of(stored_elements(k, tokens), dtype) + bytes_of(stored_elements(v, tokens), dtype.v)


def state_bytes(cache: RecurrentState, conv_columns: int, dtype: Dtype) -> int:
    """Bytes of a recurrent state with `conv_columns` columns of convolution inputs.

    The state's own dtypes apply; `dtype` is used only if the state names none.
    """
    conv, state = (DTYPES[name] if name else dtype for name in (cache.conv_dtype, cache.state_dtype))
    return bytes_of(cache.conv_channels * conv_columns, conv) + bytes_of(cache.state_elements, state)


# No memory can hold this many tokens of a growing cache. If this context fits, the cache has stopped growing.
_UNBOUNDED_TOKENS = 1 << 80


class CacheRow(NamedTuple):
    """One cache of a run of layers: the first and last layer, the cache, and one sequence's bytes in one layer."""

    first: int
    last: int
    cache: Cache
    bytes_per_layer: int


def cache_rows(
    spec: ModelSpec, dtype: Dtype, context_tokens: int, count: CountBytes = stored_cache_bytes
) -> list[CacheRow]:
    """One row per cache for every run of layers with the same caches. `count` gives the bytes of one cache.

    Raises UsageError if the dtype's blocks do not divide a token's row.
    """
    # Most runs of layers repeat one of two or three caches, so each distinct cache is counted once.
    sizes = [count(cache, context_tokens, dtype) for cache, _ in checked_caches(spec, dtype)]
    return [CacheRow(first, last, cache, sizes[place]) for first, last, cache, place in _placed_caches(spec)]


@remembered
def _placed_caches(spec: ModelSpec) -> list[tuple[int, int, Cache, int]]:
    """Every cache of every run of layers: first layer, last layer, cache, and its place in `distinct_caches`."""
    places = {(type(cache), cache): place for place, (cache, _) in enumerate(distinct_caches(spec))}
    runs = cache_runs(spec)
    return [(first, last, cache, places[type(cache), cache]) for first, last, caches in runs for cache in caches]


def sequence_bytes(spec: ModelSpec, dtype: Dtype, context_tokens: int, count: CountBytes = stored_cache_bytes) -> int:
    """Bytes of one sequence of `context_tokens` tokens in all layers."""
    total = 0
    for cache, num_layers in checked_caches(spec, dtype):
        total += num_layers * count(cache, context_tokens, dtype)
    return total


@remembered
def checked_caches(spec: ModelSpec, dtype: Dtype) -> list[tuple[Cache, int]]:
    """The distinct caches of a model, and the number of layers that have each.

    Raises UsageError if the dtype's blocks do not divide a token's row.
    """
    caches = distinct_caches(spec)
    for cache, _ in caches:
        check_rows(cache.token_rows(), dtype)
    return caches


def stored_bytes(spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int = 1) -> int:
    """Bytes attention must keep for `batch_size` sequences of `context_tokens` tokens, according to the formula."""
    return batch_size * sequence_bytes(spec, dtype, context_tokens)


def decode_read_bytes(spec: ModelSpec, dtype: Dtype, context_tokens: int, batch_size: int = 1) -> int:
    """Bytes of cache one decode step reads for the whole batch, including the new token's own row: the formula's.

    An engine may store other types (`kvcalc.memory.reads`).
    """
    return batch_size * sequence_bytes(spec, dtype, context_tokens, read_cache_bytes)


@remembered
def on_device(spec: ModelSpec, tensor_parallel_size: int) -> ModelSpec:
    """The share of `spec`'s caches that each of `tensor_parallel_size` devices holds."""
    return map_caches(spec, lambda cache: share_of_device(cache, tensor_parallel_size))


class Growth(NamedTuple):
    """How one sequence's cache grows near a context: bytes = fixed_bytes + bytes_per_token * tokens."""

    bytes_per_token: int
    fixed_bytes: int

    def bytes_at(self, tokens: int) -> int:
        """One sequence's bytes at the context that the growth was computed at, and an estimate near it."""
        return self.fixed_bytes + self.bytes_per_token * tokens


def growth(bytes_at: Callable[[int], int], context_tokens: int, period: int = 1) -> Growth:
    """The slope at `context_tokens` (the bytes one more token adds) and the bytes that do not grow with the context.

    `bytes_at` gives one sequence's bytes at a context. A full window no longer grows and counts as fixed. If tokens
    are compressed in groups, the slope is the mean over a `period`, rounded up. It is limited so that the fixed bytes
    are never negative.
    """
    later, here = bytes_at(context_tokens + period), bytes_at(context_tokens)
    return growth_of(here, later, context_tokens, period)


def growth_of(here: int, later: int, context_tokens: int, period: int) -> Growth:
    """`growth` from one sequence's bytes at a context and at one that is a `period` longer."""
    return growth_at_slope(-((here - later) // period), here, context_tokens)


def growth_at_slope(slope: int, here: int, context_tokens: int) -> Growth:
    """`growth` from one sequence's bytes at a context and the bytes that one more token adds."""
    slope = min(slope, here // context_tokens)
    return Growth(slope, here - slope * context_tokens)


def longest_context(
    bytes_at: Callable[[int], int], memory_bytes: int, period: int = 1, block_tokens: int = 1
) -> int | None:
    """The longest context for which the cache, at every length up to it, fits into `memory_bytes`.

    Returns 0 if no token fits, None if the context is unbounded. If tokens are compressed in groups of `period`, the
    bytes peak at the last token but one of a group and fall when the group is complete. The first period that does not
    fit is found by its peak, and the token within it by trying each one. `block_tokens` is the number of tokens after
    which an engine's cache grows. It only makes the search shorter.
    """
    if bytes_at(_UNBOUNDED_TOKENS * period - 1) <= memory_bytes:
        return None
    if period == 1:
        if block_tokens == 1:
            return most_that_fit(bytes_at, memory_bytes, _UNBOUNDED_TOKENS)
        whole = block_tokens * most_that_fit(lambda n: bytes_at(n * block_tokens), memory_bytes, _UNBOUNDED_TOKENS)
        # most_that_fit gives 0 if the first token after the whole blocks does not fit.
        return whole + most_that_fit(lambda n: bytes_at(whole + n), memory_bytes, block_tokens)
    whole = most_that_fit(lambda n: bytes_at(n * period - 1) if n else 0, memory_bytes, _UNBOUNDED_TOKENS) * period
    first = next(t for t in range(max(whole, 1), whole + period) if bytes_at(t) > memory_bytes)
    return first - 1


def most_that_fit(bytes_of_count: Callable[[int], int], memory_bytes: int, too_many: int) -> int:
    """The largest count below `too_many` whose bytes are within `memory_bytes`, or 0 if there is none.

    `too_many` must not fit, and `bytes_of_count` must not decrease as the count grows. Most curves are straight lines,
    or steps along one. So the search first tries the count at which a line between the two ends reaches the memory
    limit, then a nearby count, which is further away in each round. If both together do not halve the interval, it
    tries the middle. The result is exact for any shape.
    """
    below = bytes_of_count(1) if too_many > 1 else memory_bytes + 1
    if below > memory_bytes:
        return 0
    fits, above, beside = 1, bytes_of_count(too_many), 1
    while too_many - fits > 1:
        left = too_many - fits
        probe = fits + left * (memory_bytes - below) // (above - below)
        for attempt in range(3):
            if attempt == 1:
                probe = fits + beside if probe == fits else too_many - beside
            elif attempt == 2:
                probe = (fits + too_many) // 2
            if not fits < probe < too_many:
                probe = min(max(probe, fits + 1), too_many - 1)
            held = bytes_of_count(probe)
            if held <= memory_bytes:
                fits, below = probe, held
            else:
                too_many, above = probe, held
            if too_many - fits <= 1 or (attempt == 1 and 2 * (too_many - fits) <= left):
                break
        beside *= 16
    return fits
