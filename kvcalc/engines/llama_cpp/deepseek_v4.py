"""DeepSeek-V4 in llama.cpp: each slot has a window cache, caches of compressed entries, and compressor states.

Source: llama-kv-cache-dsv4.cpp, models/deepseek4.cpp and conversion/deepseek.py in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections import defaultdict
from math import lcm

from kvcalc.engines.account import Line, lines_of
from kvcalc.engines.engine import not_established
from kvcalc.engines.llama_cpp.account import Cells
from kvcalc.engines.llama_cpp.engine import LlamaCpp
from kvcalc.engines.rounding import ceil_div, round_up
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.kv_cache import entry_sizes, stored_cache_bytes
from kvcalc.model.caches import Cache, CompressedAttention
from kvcalc.model.spec import ModelSpec, all_caches, distinct_caches, windows
from kvcalc.records import NamedTuple

# The engine has fixed rates for both kinds of layers (DSV4_CSA_RATIO, DSV4_HCA_RATIO). The cells of entries are rounded
# up like the cells of tokens.
_SPARSE, _HEAVY = 4, 128
_PADDING = 256


class _Parts(NamedTuple):
    """Bytes of one layer in one slot."""

    window: int
    entries: int
    states: int


class DeepseekV4(LlamaCpp):
    """Counts a context in which every slot has its own cells for a whole sequence, even if the slots are unified.

    Only K is kept, in the type of K. Compressors keep keys and gates in fp32, and once more for each drafted token
    (llama_dsv4_comp_state). Raises ModelError (exit 3) for older
    builds, which do not run the model, and for compression rates that llama.cpp does not support.
    """

    shares_cells = False

    def check_model(self) -> None:
        spec, before = self.spec, self.chosen.before_pull
        if before is not None:
            raise ModelError(f"{spec.name}: llama.cpp builds before pull request {before} do not run this model")
        for cache in all_caches(spec):
            if not isinstance(cache, CompressedAttention):
                raise not_established(spec, "llama.cpp", cache.kind)
            if cache.compress_rate != (_SPARSE if cache.index_head_dim else cache.compress_rate and _HEAVY):
                raise ModelError(
                    f"{spec.name}: llama.cpp compresses by {_SPARSE} with an indexer and by {_HEAVY} without one"
                )

    def window(self, share: ModelSpec) -> int:
        return max(windows(self.spec))

    def kept_by_slots(self) -> str:
        return "a cache"

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        made = self.cells(self.spec, tokens, 1)
        if not isinstance(cache, CompressedAttention):
            return 0
        parts = _parts(cache, made, dtype)
        return made.slots * (sum(parts) + self.chosen.draft_max * parts.states)

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        return entry_sizes(cache, dtype)

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
            drafted = self.chosen.draft_max * parts.states
            window, entries, states = (bytes_of(elements, dtype) for elements in _stored_elements(cache, tokens))
            sizes["stored"] += times * stored_cache_bytes(cache, tokens, dtype)
            sizes["window cells beyond the window"] += times * (parts.window - window)
            sizes["entry cells rounded up"] += times * (parts.entries - entries)
            sizes["full compressor states in fp32"] += times * (parts.states - states)
            sizes["states for prefixes and drafts"] += num_layers * made.slots * drafted
            sizes["slots beyond the batch"] += num_layers * (made.slots - batch) * sum(parts)
        return lines_of(sizes)


def _stored_elements(cache: CompressedAttention, tokens: int) -> tuple[int, int, int]:
    """Elements that attention stores: the window, the entries with their index keys, and the compressors' buffers."""
    parts = dict(cache.stored_parts(tokens))
    return parts["window"], parts.get("compressed", 0) + parts.get("index keys", 0), parts.get("buffers", 0)


def _parts(cache: CompressedAttention, cells: Cells, dtype: Dtype) -> _Parts:
    """The bytes of one layer in one slot.

    The compressors of sparse layers overlap, including the indexer's: keys and gates are twice as wide and cover two
    runs.
    """
    window = cells.window_cells * bytes_of(cache.head_dim, dtype)
    if not cache.compress_rate:
        return _Parts(window, 0, 0)
    rows = round_up(max(1, ceil_div(cells.cells, cache.compress_rate)), _PADDING)
    width, index = cache.head_dim, cache.index_head_dim
    overlap = 2 if index else 1
    state = 2 * overlap * (width + index) * overlap * cache.compress_rate
    entries = rows * (bytes_of(width, dtype) + (bytes_of(index, dtype) if index else 0))
    return _Parts(window, entries, bytes_of(state, DTYPES["fp32"]))
