"""How many cells a context has: rounded up, one stream of them for each slot or one for all.

Source: llama_context::llama_context, llama-context.cpp, and llama_kv_cache_iswa, llama-kv-cache-iswa.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcalc.memory.engines.llama_cpp.settings import Settings
from kvcalc.memory.engines.rounding import round_up


class Cells(NamedTuple):
    """`batch` sequences of `tokens` in `slots`, in `streams` of `cells` each; `window_cells` where a window is kept."""

    tokens: int
    batch: int
    slots: int
    streams: int
    cells: int
    window_cells: int

    @property
    def n_ctx(self) -> int:
        return self.cells * self.streams


def cells_for(settings: Settings, tokens: int, batch: int, window: int | None, *, shares_windows: bool = True) -> Cells:
    """The cells of a context in which `batch` sequences of `tokens` fit. `shares_windows`: whether the slots of a
    unified context share their windows' cells as well."""
    slots = max(settings.parallel, batch)
    unified = settings.has_one_stream
    streams = 1 if unified else slots
    cells = round_up(tokens * batch if unified else tokens, settings.padding)
    window_cells = cells
    if window is not None and not settings.swa_full:
        kept = window * (slots if unified and shares_windows else 1) + settings.ubatch_size
        window_cells = round_up(min(cells, kept), settings.padding)
    return Cells(tokens, batch, slots, streams, cells, window_cells)
