"""DeepSeek-V4 under llama.cpp: a cache of windows, caches of entries, and the compressors' states, for every slot.

Source: llama-kv-cache-dsv4.cpp, models/deepseek4.cpp and conversion/deepseek.py as they stand in llama-cpp-python
0.3.36.
"""

from __future__ import annotations

from collections import defaultdict
from math import lcm
from typing import NamedTuple

from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.engines import Line, lines_of, not_established
from kvcalc.memory.engines.llama_cpp import LlamaCpp
from kvcalc.memory.engines.llama_cpp.account import Cells, cells_for
from kvcalc.memory.engines.rounding import ceil_div, round_up
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, windows

# The rates of both kinds of layers are the engine's own (DSV4_CSA_RATIO, DSV4_HCA_RATIO), and cells of entries are
# rounded up as cells of tokens are.
_SPARSE, _HEAVY = 4, 128
_PADDING = 256


class _Parts(NamedTuple):
    """Bytes of one layer for one slot."""

    window: int
    entries: int
    states: int


class DeepseekV4(LlamaCpp):
    """The accounting of a context whose slots all have cells of their own, with --kv-unified too.

    K alone is kept, in the type of K; compressors keep keys and gates in fp32. Raises ModelError (exit 3) for older
    builds, which do not run it, and for rates llama.cpp does not have.
    """

    def check_model(self) -> None:
        spec, before = self.spec, self.chosen.before_pull
        if before is not None:
            raise ModelError(f"{spec.name}: llama.cpp builds as old as --before-pull {before} do not run it")
        for cache in all_caches(spec):
            if not isinstance(cache, CompressedAttention):
                raise not_established(spec, "llama.cpp", cache.kind)
            if cache.compress_rate != (_SPARSE if cache.index_head_dim else cache.compress_rate and _HEAVY):
                raise ModelError(
                    f"{spec.name}: llama.cpp compresses by {_SPARSE} with an indexer and by {_HEAVY} without"
                )

    def window(self, share: ModelSpec) -> int:
        return max(windows(self.spec))

    def cells(self, share: ModelSpec, tokens: int, batch: int) -> Cells:
        return cells_for(self.chosen, tokens, batch, self.window(share), shares_windows=False)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        made = self.cells(self.spec, tokens, 1)
        return made.slots * sum(_parts(cache, made, dtype)) if isinstance(cache, CompressedAttention) else 0

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return lcm(self.chosen.padding, _PADDING * _HEAVY)

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        self.check_types(share, dtype)
        made = self.cells(share, tokens, batch)
        sizes: defaultdict[str, int] = defaultdict(int)
        for cache, num_layers in distinct_caches(share):
            if not isinstance(cache, CompressedAttention):
                continue
            parts, times = _parts(cache, made, dtype), num_layers * batch
            window, entries, states = (bytes_of(elements, dtype) for elements in _stored_elements(cache, tokens))
            sizes["stored"] += times * stored_cache_bytes(cache, tokens, dtype)
            sizes["cells of windows beside the window"] += times * (parts.window - window)
            sizes["cells of entries rounded up"] += times * (parts.entries - entries)
            sizes["compressors' states whole and in fp32"] += times * (parts.states - states)
            sizes["slots beside the batch"] += num_layers * (made.slots - batch) * sum(parts)
        return lines_of(sizes)


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
