"""DeepSeek-V4 under llama.cpp: a cache of windows, caches of entries, and the compressors' states, for every slot.

Source: llama-kv-cache-dsv4.cpp, models/deepseek4.cpp and conversion/deepseek.py as they stand in llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, NamedTuple

from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.engines import Engine, Line
from kvcalc.memory.engines.llama_cpp.cells import Cells, cells_for
from kvcalc.memory.engines.llama_cpp.settings import VERSION, Settings
from kvcalc.memory.engines.rounding import ceil_div, round_up
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention
from kvcalc.model.spec import ModelSpec, all_caches, windows

MODEL_TYPES = ("deepseek_v4", "deepseek_ref")

# The rates of both kinds of layers are the engine's own (DSV4_CSA_RATIO, DSV4_HCA_RATIO), and cells of entries are
# rounded up as cells of tokens are.
_SPARSE, _HEAVY = 4, 128
_PADDING = 256


class _Parts(NamedTuple):
    """Bytes of one layer for one slot."""

    window: int
    entries: int
    states: int


def engine(spec: ModelSpec, settings: Settings, check_types: Callable[[ModelSpec, Dtype], None]) -> Engine:
    """The accounting of a context whose slots all have cells of their own, with --kv-unified too.

    K alone is kept, in the type of K; compressors keep keys and gates in fp32. `check_types` refuses what llama.cpp
    refuses of types. Raises ModelError (exit 3) for older builds, which do not run it, and for rates llama.cpp does not
    have.
    """
    caches = all_caches(spec)
    if settings.before_pull is not None:
        raise ModelError(f"{spec.name}: llama.cpp builds as old as --before-pull {settings.before_pull} do not run it")
    for cache in caches:
        if not isinstance(cache, CompressedAttention):
            raise ModelError(f"{spec.name}: llama.cpp's layout of {cache.kind.replace('_', ' ')} is not established")
        if cache.compress_rate != (_SPARSE if cache.index_head_dim else cache.compress_rate and _HEAVY):
            raise ModelError(f"{spec.name}: llama.cpp compresses by {_SPARSE} with an indexer and by {_HEAVY} without")
    span = max(windows(spec))

    def cells(tokens: int, batch: int) -> Cells:
        return cells_for(settings, tokens, batch, span, shares_windows=False)

    def pool(share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        check_types(share, dtype)
        made = cells(tokens, batch)
        stored = window = entries = states = slots = 0
        for group in share.layers:
            for cache in group.caches:
                if not isinstance(cache, CompressedAttention):
                    continue
                parts = _parts(cache, made, dtype)
                held = [bytes_of(elements, dtype) for elements in _stored_elements(cache, tokens)]
                stored += group.num_layers * batch * stored_cache_bytes(cache, tokens, dtype)
                window += group.num_layers * batch * (parts.window - held[0])
                entries += group.num_layers * batch * (parts.entries - held[1])
                states += group.num_layers * batch * (parts.states - held[2])
                slots += group.num_layers * (made.slots - batch) * sum(parts)
        named = {
            "stored": stored,
            "cells of windows beside the window": window,
            "cells of entries rounded up": entries,
            "compressors' states whole and in fp32": states,
            "slots beside the batch": slots,
        }
        return [Line(name, size) for name, size in named.items() if size]

    def cache_bytes(cache: Cache, tokens: int, dtype: Dtype) -> int:
        made = cells(tokens, 1)
        return made.slots * sum(_parts(cache, made, dtype)) if isinstance(cache, CompressedAttention) else 0

    def blocks(share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory_bytes: int | None) -> dict[str, Any]:
        made = cells(tokens, batch)
        return {
            "n_ctx": made.n_ctx, "n_ctx_seq": made.cells, "n_seq_max": made.slots, "n_stream": made.streams,
            "window_cells": made.window_cells,
        }  # fmt: skip

    return Engine(
        "llama.cpp", VERSION, cache_bytes, settings.describe(), (), blocks=blocks, pool=pool, splits_heads=False,
        growth_tokens=lambda share, dtype: lcm(settings.padding, _PADDING * _HEAVY),
    )  # fmt: skip


def _stored_elements(cache: CompressedAttention, tokens: int) -> tuple[int, int, int]:
    """What attention stores: of the window, of entries and their index keys, of the compressors' buffers."""
    parts = dict(cache.stored_parts(tokens))
    return parts["window"], parts.get("compressed", 0) + parts.get("index keys", 0), parts.get("buffers", 0)


def _parts(cache: CompressedAttention, cells: Cells, dtype: Dtype) -> _Parts:
    """The compressors of sparse layers, the indexer's too, overlap: keys and gates twice as wide, of two runs."""
    window = cells.window_cells * bytes_of(cache.head_dim, dtype)
    if not cache.compress_rate:
        return _Parts(window, 0, 0)
    rows = round_up(max(1, ceil_div(cells.cells, cache.compress_rate)), _PADDING)
    width, index = cache.head_dim, cache.index_head_dim
    overlap = 2 if index else 1
    state = 2 * overlap * (width + index) * overlap * cache.compress_rate
    entries = rows * (bytes_of(width, dtype) + (bytes_of(index, dtype) if index else 0))
    return _Parts(window, entries, bytes_of(state, DTYPES["fp32"]))
