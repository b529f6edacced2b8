"""The cells of a context, rounded up, in one stream for each slot or one for all; and its bytes by name.

Source: llama_context::llama_context, llama-context.cpp, and llama_kv_cache_iswa, llama-kv-cache-iswa.cpp.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import DTYPES, Dtype, bytes_of
from kvcalc.memory.engines import Line, lines_of
from kvcalc.memory.engines.llama_cpp.architectures import Layers
from kvcalc.memory.engines.llama_cpp.settings import Settings
from kvcalc.memory.engines.rounding import round_up
from kvcalc.memory.kv_cache import stored_cache_bytes
from kvcalc.model.caches import HEADS_CACHES, Cache, IndexerKeys, RecurrentState


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


def account(layers: Layers, cells: Cells, dtype: Dtype, transposes_v: bool) -> list[Line]:
    """Lines which add up to the bytes of the context.

    A row of K and a row of V for every cell; a state in fp32 for every slot, whatever its own type.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for layer in layers.not_kept:
        held = layer.num_layers * cells.batch * stored_cache_bytes(layer.cache, cells.tokens, dtype)
        sizes["stored"] += held
        sizes["K and V of the encoder made anew"] -= held
    for layer in layers.caches:
        cache, kept, count = layer
        held = cells.batch * stored_cache_bytes(cache, cells.tokens, dtype)
        sizes["stored"] += count * held
        if isinstance(cache, RecurrentState):
            state = _state_bytes(cache)
            sizes["states in fp32"] += count * (cells.batch * state - held)
            sizes["slots beside the batch"] += count * (cells.slots - cells.batch) * state
            continue
        row = _row_bytes(kept, dtype)
        windowed = layers.is_windowed(cache)
        stream = row * (cells.window_cells if windowed else cells.cells)
        # Streams of slots no sequence of the batch is in.
        used = min(cells.streams, cells.batch)
        sizes["slots beside the batch"] += count * (cells.streams - used) * stream
        if windowed:
            sizes["cells of windows beside the window"] += count * (used * stream - held)
        else:
            beside = "V beside the indexer's keys" if isinstance(cache, IndexerKeys) else "K and V beside the latent"
            needed = cells.batch * cells.tokens * row
            sizes[beside if cache.window is None else "windows kept whole"] += count * (needed - held)
            sizes["cells rounded up"] += count * (used * stream - needed)
        if transposes_v and layer.has_heads:
            spare = bytes_of(layers.widest_v - layer.v_row, dtype.v or dtype)
            padded = count * cells.streams * stream // row * spare
            sizes["V padded to the widest layer's"] += padded
    return lines_of(sizes)


def _state_bytes(cache: RecurrentState) -> int:
    """The inputs of the convolution before the current one, and the state (n_embd_r and n_embd_s)."""
    elements = cache.conv_channels * (cache.conv_kernel - 1) + cache.state_elements
    return bytes_of(elements, DTYPES["fp32"])


def _row_bytes(cache: Cache, dtype: Dtype) -> int:
    """One cell's bytes: K's row and V's; MLA and indexers have no V. Blocks must divide a head."""
    rows = cache.token_rows()
    types = (dtype, dtype.v or dtype)
    if isinstance(cache, HEADS_CACHES):
        for width, used, name in zip((cache.k_head_dim, cache.v_head_dim), types, "kv"):
            if width % used.block_elements:
                raise UsageError(
                    f"--cache-type-{name} {used.name}: blocks of {used.block_elements} do not divide a head of {width}"
                )
    return sum(bytes_of(row, used) for row, used in zip(rows, types))
